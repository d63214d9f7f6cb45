"""Names on a cluster: murmur2 against the Java client's own vectors, partitions, and ids that cannot collide."""

from __future__ import annotations

import hashlib
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import ids
from headrace.schemas.errors import ConfigurationError, HeadraceError

RUN_IDS = st.text("abcxyz019-", min_size=1, max_size=40)
NAMES = st.text("abcxyz019-._", min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("data", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_gives_the_numbers_of_kafkas_own_test(data: bytes, signed: int) -> None:
    assert ids.murmur2(data) == signed & 0xFFFFFFFF


@given(st.binary(max_size=70))
def test_murmur2_is_an_unsigned_32_bit_number_that_depends_on_every_byte(data: bytes) -> None:
    found = ids.murmur2(data)
    assert 0 <= found < 1 << 32
    assert ids.murmur2(data + b"\0") != found
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        assert ids.murmur2(bytes(changed)) != found


@pytest.mark.parametrize("size", range(9))
def test_murmur2_reads_tails_of_every_length(size: int) -> None:
    """Against the definition, word by word, with a tail read byte by byte as the Java client does."""
    data = bytes(range(200, 200 + size))
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ size
    for word in range(size // 4):
        k = int.from_bytes(data[4 * word : 4 * word + 4], "little") * m & mask
        k ^= k >> 24
        h = (h * m & mask) ^ (k * m & mask)
    tail = data[size // 4 * 4 :]
    for place in reversed(range(len(tail))):
        h ^= tail[place] << 8 * place
    if tail:
        h = h * m & mask
    h ^= h >> 13
    h = h * m & mask
    assert ids.murmur2(data) == h ^ (h >> 15)


def test_the_partition_of_a_group_is_that_of_a_java_producer_keyed_by_its_decimal_id() -> None:
    """The Java client takes ``toPositive(murmur2(key)) % partitions``; 21 is one of its vectors."""
    for partitions in (1, 3, 8, 32):
        assert ids.group_partition(21, partitions) == (-973932308 & 0x7FFFFFFF) % partitions


@given(st.integers(0, 2**63 - 1), st.integers(1, 300))
def test_partitions_of_groups_lie_in_range(group: int, partitions: int) -> None:
    assert 0 <= ids.group_partition(group, partitions) < partitions


def test_groups_spread_over_all_partitions() -> None:
    counts = [0] * 8
    for group in range(4_000):
        counts[ids.group_partition(group, 8)] += 1
    assert min(counts) > 400
    assert max(counts) < 600


def test_an_inbox_is_the_crc32_of_the_workers_name() -> None:
    assert zlib.crc32(b"123456789") == 0xCBF43926, "the check value of CRC-32"
    assert ids.inbox_of("123456789", 64) == 0xCBF43926 % 64
    assert {ids.inbox_of(f"rollout-{n}", 4) for n in range(40)} == {0, 1, 2, 3}
    assert ids.inbox_of("wörker", 64) == zlib.crc32("wörker".encode()) % 64


@pytest.mark.parametrize("run", ["a", "0", "-", "first-run-2", "x" * 40])
def test_run_ids_that_may_be_used_are_returned(run: str) -> None:
    assert ids.check_run_id(run) == run


@pytest.mark.parametrize("run", ["", "x" * 41, "First", "a.b", "a_b", "a b", "a/b", "ä", "a\n", "\na", "१"])
def test_run_ids_that_could_leave_their_namespace_are_refused(run: str) -> None:
    with pytest.raises(ConfigurationError, match="take 1 to 40 of the characters") as caught:
        ids.check_run_id(run)
    assert repr(run) in str(caught.value)
    assert isinstance(caught.value, HeadraceError)


@given(RUN_IDS, NAMES)
def test_a_prefix_is_taken_off_as_it_was_put_on(run: str, topic: str) -> None:
    full = ids.topic_name(run, topic)
    assert ids.unprefixed(run, full) == topic
    assert full.startswith(f"{run}.")


@given(RUN_IDS, RUN_IDS, NAMES, NAMES)
def test_two_runs_never_meet(one: str, two: str, topic: str, other: str) -> None:
    """A run id holds no dot, so equal names on the cluster mean equal runs and equal topics."""
    if (one, topic) != (two, other):
        assert ids.topic_name(one, topic) != ids.topic_name(two, other)
    if one != two:
        assert not ids.topic_name(one, topic).startswith(ids.topic_name(two, ""))
        assert ids.consumer_group(one, "schedule") != ids.consumer_group(two, "schedule")
        assert ids.transactional_id(one, "batch", "ops-0") != ids.transactional_id(two, "batch", "ops-0")


def test_a_name_of_another_run_keeps_its_prefix() -> None:
    assert ids.unprefixed("first", "second.prompts") == "second.prompts"
    assert ids.unprefixed("first", "first.batches.main") == "batches.main"


def test_the_names_of_the_protocol() -> None:
    assert ids.consumer_group("first", "assemble") == "first.assemble"
    assert ids.transactional_id("first", "trainer", "main") == "first.trainer.main"
    assert ids.changelog_topic("batch", "state") == "batch-state-changelog"
    assert ids.blob_key("first", 5, 1, 2) == "runs/first/blobs/5/1/2"


def test_a_prompt_id_is_the_start_of_the_rows_sha256() -> None:
    row = json.dumps({"prompt": "1+1="}).encode()
    assert ids.prompt_id_of(row) == hashlib.sha256(row).hexdigest()[:16]
    assert ids.prompt_id_of(b"") == "e3b0c44298fc1c14"
    assert len({ids.prompt_id_of(b"%d" % n) for n in range(2_000)}) == 2_000
