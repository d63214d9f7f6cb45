"""Names and identities: run ids, prefixed topics, groups and transactional ids, partitions (protocol 1).

Pure functions. Everything a process names on a cluster comes from here, so that two runs never meet.
"""

import hashlib
import re
import zlib
from functools import lru_cache

from headrace.schemas.errors import ConfigurationError

__all__ = (
    "blob_key",
    "changelog_topic",
    "check_run_id",
    "consumer_group",
    "group_partition",
    "inbox_of",
    "murmur2",
    "prompt_id_of",
    "topic_name",
    "transactional_id",
    "unprefixed",
)

_RUN_ID = re.compile(r"[a-z0-9-]{1,40}")


def check_run_id(run: str) -> str:
    """Return ``run`` or raise ConfigurationError: a run id is 1 to 40 of ``a-z 0-9 -``."""
    if not _RUN_ID.fullmatch(run):
        raise ConfigurationError(f"run id {run!r} is not usable: take 1 to 40 of the characters a-z, 0-9 and '-'")
    return run


def topic_name(run: str, topic: str) -> str:
    """The name on the cluster of a topic of a run.

    >>> topic_name("first", "prompts")
    'first.prompts'
    """
    return f"{run}.{topic}"


@lru_cache(4096)
def unprefixed(run: str, topic: str) -> str:
    """The topic's name within its run (the inverse of ``topic_name``)."""
    return topic.removeprefix(f"{run}.")


def consumer_group(run: str, sub_topology: str) -> str:
    """The consumer group of a sub-topology: ``<run>.<sub-topology>``."""
    return f"{run}.{sub_topology}"


def transactional_id(run: str, role: str, instance: str) -> str:
    """The transactional id of a named instance: ``<run>.<role>.<instance>`` (role: a sub-topology, source, trainer)."""
    return f"{run}.{role}.{instance}"


def changelog_topic(sub_topology: str, store: str) -> str:
    """The changelog of a store, without the run's prefix: ``<sub-topology>-<store>-changelog``."""
    return f"{sub_topology}-{store}-changelog"


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 (seed 0x9747b28c) of ``data`` as an unsigned 32-bit number; equals the Java client's.

    >>> murmur2(b"21") == (-973932308) & 0xFFFFFFFF
    True
    """
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    length = len(data)
    h = 0x9747B28C ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ (k >> 24)) * m & mask
        h = (h * m & mask) ^ k
    if length > whole:
        h = (h ^ int.from_bytes(data[whole:], "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)


def group_partition(group: int, partitions: int) -> int:
    """The partition of everything keyed by a group id: ``murmur2(decimal group id) mod partitions``."""
    return (murmur2(str(group).encode()) & 0x7FFFFFFF) % partitions


def inbox_of(worker: str, inboxes: int) -> int:
    """The partition of ``tasks`` that a worker reads: ``crc32(worker) mod inboxes``."""
    return zlib.crc32(worker.encode()) % inboxes


def prompt_id_of(row: bytes) -> str:
    """The id of a prompt without one of its own: 16 hex digits of the sha256 of its canonical row."""
    return hashlib.sha256(row).hexdigest()[:16]


def blob_key(run: str, group: int, replica: int, attempt: int) -> str:
    """The object key of an offloaded trajectory's arrays (protocol 6)."""
    return f"runs/{run}/blobs/{group}/{replica}/{attempt}"
