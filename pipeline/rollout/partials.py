"""Prefixes of unfinished trajectories on their way from one attempt to the next, through the topic ``partials``.

Goes in: what episodes have sampled when they are broken off; comes out: Partial records whose offsets Demand tells
``schedule``, and for a task that names such an offset its sequences. A prefix that cannot be written or read costs the
tokens in it and nothing else: the attempt begins anew.
"""

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.connectors.blobs import array_bytes
from headrace.connectors.kafka import MAX_MESSAGE_BYTES, Connection
from headrace.connectors.kafka_errors import KafkaFailure, MissingTopic
from headrace.pipeline.rollout.delivery import Delivery
from headrace.pipeline.rollout.episode import Episode
from headrace.pipeline.rollout.holdings import Holdings
from headrace.pipeline.rollout.sampler import Sampler
from headrace.schemas.errors import InvalidRecord, UndecodableRecord
from headrace.schemas.ids import group_partition
from headrace.schemas.parts import Sequence
from headrace.schemas.records import Partial, Task

__all__ = ("Partials",)

_MOST_BYTES = MAX_MESSAGE_BYTES // 2
_READ_SECONDS = 5.0


@dataclass(slots=True)
class Partials:
    """Writes and reads the prefixes of one worker.

    partitions: of everything keyed by group. least_tokens: newly sampled tokens from which on a prefix is worth a
    record.
    """

    connection: Connection
    delivery: Delivery
    holdings: Holdings
    partitions: int
    least_tokens: int

    def write(self, samplers: Iterable[Sampler]) -> list["asyncio.Task[None]"]:
        """Begin to write what was broken off; returns the writing, each ends when its offset is known."""
        broken_off: dict[Episode, list[Sequence]] = {}
        for sampler in samplers:
            for episode, sequences in sampler.prefixes().items():
                broken_off.setdefault(episode, []).extend(sequences)
        return [asyncio.create_task(self._write(task, s)) for task, s in self._worth_it(broken_off)]

    def _worth_it(self, broken_off: Mapping[Episode, list[Sequence]]) -> Iterable[tuple[Task, list[Sequence]]]:
        for episode, running in broken_off.items():
            sequences = episode.sequences(running)
            tokens = sum(int(s.mask.sum()) for s in sequences)
            if episode.task is None or episode.task.kind != "train" or tokens - episode.written < self.least_tokens:
                continue
            if array_bytes(sequences) > _MOST_BYTES:
                _say(f"the prefix of {_name(episode.task)} has {array_bytes(sequences)} bytes, too many for a record")
                continue
            episode.written = tokens
            yield episode.task, sequences

    async def _write(self, task: Task, sequences: list[Sequence]) -> None:
        record = Partial(
            group=task.group, replica=task.replica, attempt=task.attempt, worker=task.worker,
            incarnation=task.incarnation, written_ms=time.time_ns() // 1_000_000, sequences=sequences,
        )  # fmt: skip
        try:
            offset = await self.delivery.partial(record)
        except InvalidRecord as error:
            _say(f"the prefix of {_name(task)} cannot travel: {error}")
            return
        self.holdings.saved(task, offset)

    async def recall(self, task: Task) -> list[Sequence]:
        """The sequences of the Partial that a task names; none when it is not to be had."""
        try:
            partial = await asyncio.to_thread(self._read, group_partition(task.group, self.partitions), task.partial)
        except (KafkaFailure, MissingTopic, UndecodableRecord) as error:
            _say(f"{_name(task)} begins anew: {error}")
            return []
        if partial is None or (partial.group, partial.replica) != (task.group, task.replica):
            _say(f"{_name(task)} begins anew: there is no prefix of it at partials@{task.partial}")
            return []
        return partial.sequences

    def _read(self, partition: int, offset: int) -> Partial | None:
        where, until = {partition: offset}, {partition: offset + 1}
        for raw in self.connection.read_topic("partials", where, until=until, timeout=_READ_SECONDS):
            record = raw.decoded()
            if raw.offset == offset and isinstance(record, Partial):
                return record
        return None


def _name(task: Task) -> str:
    return f"{task.kind} group {task.group} replica {task.replica} attempt {task.attempt}"


def _say(text: str) -> None:
    sys.stdout.write(f"rollout: {text}\n")
    sys.stdout.flush()
