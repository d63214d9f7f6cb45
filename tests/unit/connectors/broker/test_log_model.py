"""A partition against a plain model under random schedules: appends, transactions, cuts, compaction, restarts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from headrace.connectors.broker import batches
from headrace.connectors.broker.codes import BrokerError, Code
from headrace.connectors.broker.compaction import Compaction
from headrace.connectors.broker.log import PartitionLog
from headrace.connectors.broker.settings import TopicSettings
from headrace.connectors.broker.storage import MemoryStorage
from headrace.connectors.broker.topics import Cleanings

Build = Callable[..., bytearray]
Make = Callable[..., TopicSettings]


@dataclass
class Model:
    """What a partition must hold: offset -> (key, value) of committed records, in plain lists."""

    start: int = 0
    end: int = 0
    rows: dict[int, tuple[bytes, bytes | None]] = field(default_factory=dict)
    open: dict[int, list[int]] = field(default_factory=dict)
    hidden: dict[int, tuple[bytes, bytes | None]] = field(default_factory=dict)

    @property
    def stable(self) -> int:
        """The last stable offset."""
        return min((offsets[0] for offsets in self.open.values()), default=self.end)

    def append(self, pairs: list[tuple[bytes, bytes | None]], producer: int | None) -> None:
        """Records of a plain producer, or of an open transaction."""
        offsets = range(self.end, self.end + len(pairs))
        target = self.rows if producer is None else self.hidden
        target.update(zip(offsets, pairs, strict=True))
        if producer is not None:
            self.open.setdefault(producer, []).extend(offsets)
        self.end += len(pairs)

    def finish(self, producer: int, commit: bool) -> None:
        """The end of a transaction takes one offset."""
        for offset in self.open.pop(producer):
            row = self.hidden.pop(offset)
            if commit:
                self.rows[offset] = row
        self.end += 1

    def visible(self) -> dict[int, tuple[bytes, bytes | None]]:
        """What a committed reader gets from the start on."""
        return {o: row for o, row in self.rows.items() if self.start <= o < self.stable}

    def latest(self) -> dict[bytes, bytes | None]:
        """The newest value of each key, None for a deleted one."""
        return {key: value for _, (key, value) in sorted(self.visible().items())}


def _value(body: bytes, key: bytes) -> bytes | None:
    """The value in a record's body; keys and values here are shorter than 64 bytes."""
    at = 1 + len(key)
    size = body[at]
    return None if size & 1 else body[at + 1 : at + 1 + (size >> 1)]


def _read(log: PartitionLog) -> dict[int, tuple[bytes, bytes | None]]:
    """What a client of isolation level read_committed gets, fetch by fetch; aborted data is skipped Kafka's way."""
    rows: dict[int, tuple[bytes, bytes | None]] = {}
    offset, limit = log.start, log.last_stable_offset
    while (piece := log.read(offset, 300, limit, True)) is not None:
        data = piece[0].file.read(piece[0].position, piece[0].size)
        aborted = sorted(log.aborted_between(offset, piece[1]), key=lambda entry: entry[1])
        skipping: set[int] = set()
        at = 0
        while at < len(data):
            header = batches.read_header(data, at)
            batch = data[at : at + header.size]
            at += header.size
            while aborted and aborted[0][1] <= header.last_offset:
                skipping.add(aborted.pop(0)[0])
            if header.is_control:
                skipping.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in skipping):
                content = batches.inflated(batch, header)
                assert content is not None
                for record in batches.records(content, header):
                    if record.offset >= log.start:
                        assert record.key is not None
                        rows[record.offset] = record.key, _value(record.body, record.key)
        assert piece[1] > offset, "a reader gets on"
        offset = piece[1]
    return rows


class Play:
    """One random schedule over a log and its model."""

    def __init__(self, seed: int, settings: TopicSettings, build: Build) -> None:
        self.dice = random.Random(seed)
        self.build = build
        self.memory = MemoryStorage()
        self.settings = settings
        self.log = PartitionLog(self.memory, "t/0", settings)
        self.model = Model()
        self.now = 0
        self.sequences: dict[int, int] = {}
        self.cleanings: Cleanings = []

    def step(self) -> None:
        """One thing that happens to a partition."""
        self.now += self.dice.randrange(20)
        moves = [self.append] * 6 + [self.transact] * 4 + [self.finish] * 3 + [self.restart]
        moves += [self.compact] if self.settings.compacts else [self.cut, self.retain]
        self.dice.choice(moves)()
        log, model = self.log, self.model
        assert (log.start, log.end, log.last_stable_offset) == (model.start, model.end, model.stable)

    def pairs(self) -> list[tuple[bytes, bytes | None]]:
        """A few records over few keys, some of them tombstones."""
        count = self.dice.randint(1, 3)
        return [
            (b"k%d" % self.dice.randrange(6), None if self.dice.random() < 0.15 else b"%d" % self.dice.randrange(10**6))
            for _ in range(count)
        ]

    def send(self, pairs: list[tuple[bytes, bytes | None]], producer: int, sequence: int, inside: bool) -> int:
        """Append as a client does."""
        times = [self.now] * len(pairs)
        codec = self.dice.choice([0, 0, 1, 4])
        data = self.build(pairs, producer, 0 if producer >= 0 else -1, sequence, inside, timestamps=times, codec=codec)
        return self.log.append(data, self.now)

    def append(self) -> None:
        """Plain records."""
        pairs = self.pairs()
        assert self.send(pairs, -1, -1, False) == self.model.end
        self.model.append(pairs, None)

    def transact(self) -> None:
        """Records of one of three transactional producers; sometimes sent twice."""
        producer, pairs = self.dice.randrange(1, 4), self.pairs()
        sequence = self.sequences.get(producer, 0)
        base = self.send(pairs, producer, sequence, True)
        assert base == self.model.end
        if self.dice.random() < 0.3:
            assert self.send(pairs, producer, sequence, True) == base, "a repeat"
        self.sequences[producer] = sequence + len(pairs)
        self.model.append(pairs, producer)

    def finish(self) -> None:
        """Commit or abort one open transaction."""
        if self.model.open:
            producer, commit = self.dice.choice(sorted(self.model.open)), self.dice.random() < 0.6
            self.log.append_marker(producer, 0, commit, self.now)
            self.model.finish(producer, commit)

    def cut(self) -> None:
        """Delete records below an offset, as a janitor does: never above the last stable one."""
        offset = self.dice.randint(self.model.start, self.model.stable)
        self.log.advance_start(offset)
        self.model.start = offset

    def retain(self) -> None:
        """Retention takes whole segments, and only such as are old or too many."""
        before = self.log.start
        moved = self.log.enforce_retention(self.now)
        assert moved == (self.log.start > before)
        assert self.log.start <= self.model.end
        self.model.start = self.log.start

    def compact(self) -> None:
        """A pass keeps the newest value of each key and every offset that a reader may hold."""
        before = _read(self.log)
        compaction = Compaction(self.log, self.cleanings, self.now)
        self.cleanings = compaction.passed()
        for _ in compaction.steps():
            pass
        after = _read(self.log)
        assert after.items() <= before.items()
        self.model.rows = {o: row for o, row in self.model.rows.items() if o in after or o >= self.model.stable}

    def restart(self) -> None:
        """The broker starts again on the same files."""
        self.log = PartitionLog(self.memory, "t/0", self.settings, self.log.start)


@pytest.mark.parametrize("seed", range(12))
def test_a_deleting_partition_is_its_model(seed: int, settings: Make, batch: Build) -> None:
    play = Play(seed, settings(segment_bytes=450, segment_ms=200, retention_ms=600, retention_bytes=6000), batch)
    for _ in range(120):
        play.step()
        assert _read(play.log) == play.model.visible()
    play.restart()
    assert _read(play.log) == play.model.visible()


@pytest.mark.parametrize("seed", range(12))
def test_a_compacted_partition_keeps_the_newest_value_of_every_key(seed: int, settings: Make, batch: Build) -> None:
    """Values that the model has and the log has lost must be superseded; tombstones stay for their retention."""
    play = Play(seed, settings(cleanup_policy="compact", segment_bytes=450, segment_ms=200), batch)
    newest: dict[bytes, bytes | None] = {}
    for _ in range(120):
        play.step()
        newest = {**newest, **play.model.latest()}
        found = {key: value for _, (key, value) in sorted(_read(play.log).items())}
        assert found == newest
    play.restart()
    assert {key: value for _, (key, value) in sorted(_read(play.log).items())} == newest


@pytest.mark.parametrize("seed", range(6))
def test_a_file_cut_anywhere_loses_a_suffix_and_nothing_else(seed: int, settings: Make, batch: Build) -> None:
    """Whatever part of the last segment reached the disk: whole batches from the front, then new ones."""
    play = Play(seed, settings(segment_bytes=2000), batch)
    for _ in range(30):
        play.append()
    whole = _read(play.log)
    name = play.log.segments[-1].name
    content = bytes(play.memory.files[name].data)
    for size in sorted(play.dice.sample(range(len(content) + 1), min(40, len(content)))):
        play.memory.files[name].data = bytearray(content[:size])
        again = PartitionLog(play.memory, "t/0", play.settings)
        assert _read(again) == {o: row for o, row in whole.items() if o < again.end}
        assert play.log.segments[-1].base <= again.end <= play.log.end
        assert again.append(batch([(b"k", b"v")]), 0) == again.end - 1


@pytest.mark.parametrize("seed", range(4))
def test_a_disk_that_fills_up_refuses_batches_whole(seed: int, settings: Make, batch: Build) -> None:
    play = Play(seed, settings(), batch)
    refused = 0
    for _ in range(60):
        for file in play.memory.files.values():
            file.limit = len(file.data) + play.dice.randrange(160)
        try:
            pairs = play.pairs()
            play.send(pairs, -1, -1, False)
            play.model.append(pairs, None)
        except BrokerError as error:
            assert error.code is Code.KAFKA_STORAGE_ERROR
            refused += 1
        assert _read(play.log) == play.model.visible()
    assert 0 < refused < 60
    play.restart()
    assert _read(play.log) == play.model.visible()
