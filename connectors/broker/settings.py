"""Topic settings: Kafka's names, defaults and checks, and the typed view the log reads.

Settings that need several nodes, fsync or another message format are known, so tools may set them, and have no effect;
unknown names and values out of range are refused as Kafka refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.connectors.broker.codes import BrokerError, Code

_LONGEST = 2**63 - 1

DEFAULTS: dict[str, str] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "0",
    "flush.messages": str(_LONGEST),
    "flush.ms": str(_LONGEST),
    "index.interval.bytes": "4096",
    "max.compaction.lag.ms": str(_LONGEST),
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
"""Every setting a topic has, with its default."""

_LEAST: dict[str, int] = {
    "delete.retention.ms": 0,
    "file.delete.delay.ms": 0,
    "flush.messages": 1,
    "flush.ms": 0,
    "index.interval.bytes": 0,
    "max.compaction.lag.ms": 1,
    "max.message.bytes": 0,
    "min.compaction.lag.ms": 0,
    "min.insync.replicas": 1,
    "retention.bytes": -1,
    "retention.ms": -1,
    "segment.bytes": 14,
    "segment.index.bytes": 4,
    "segment.jitter.ms": 0,
    "segment.ms": 1,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "cleanup.policy": ("delete", "compact"),
    "compression.type": ("producer",),
    "message.timestamp.type": ("CreateTime",),
    "preallocate": ("true", "false"),
    "unclean.leader.election.enable": ("true", "false"),
}
LISTS = frozenset({"cleanup.policy"})
"""Settings whose value is a comma-separated list (APPEND and SUBTRACT apply)."""


def check(name: str, value: str | None) -> None:
    """Raise `BrokerError` INVALID_CONFIG when a setting is unknown or its value is not allowed."""
    if name not in DEFAULTS:
        raise BrokerError(Code.INVALID_CONFIG, f"unknown topic setting {name}")
    if value is None:
        raise BrokerError(Code.INVALID_CONFIG, f"{name} needs a value")
    if name in _CHOICES:
        parts = value.split(",") if name in LISTS else [value]
        for part in parts:
            if part.strip() not in _CHOICES[name]:
                raise BrokerError(Code.INVALID_CONFIG, f"{name}={value}: the local broker has {_CHOICES[name]}")
        return
    try:
        number = float(value) if name == "min.cleanable.dirty.ratio" else int(value)
    except ValueError:
        raise BrokerError(Code.INVALID_CONFIG, f"{name}={value} is not a number") from None
    low = _LEAST.get(name, 0)
    high = 1 if name == "min.cleanable.dirty.ratio" else _LONGEST
    if not low <= number <= high:
        raise BrokerError(Code.INVALID_CONFIG, f"{name}={value} is not within {low} and {high}")


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """What a log does, as numbers: bytes, milliseconds, ratio of dirty to all bytes."""

    compacts: bool
    deletes: bool
    max_message_bytes: int
    retention_bytes: int
    retention_ms: int
    segment_bytes: int
    segment_ms: int
    min_dirty_ratio: float
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    delete_retention_ms: int

    @classmethod
    def of(cls, given: Mapping[str, str]) -> TopicSettings:
        """From checked settings; what is not given has its default."""
        value = {**DEFAULTS, **given}
        policy = {part.strip() for part in value["cleanup.policy"].split(",")}
        compacts = "compact" in policy
        max_lag = int(value["max.compaction.lag.ms"])
        segment_ms = int(value["segment.ms"])
        return cls(
            compacts=compacts,
            deletes="delete" in policy,
            max_message_bytes=int(value["max.message.bytes"]),
            retention_bytes=int(value["retention.bytes"]),
            retention_ms=int(value["retention.ms"]),
            segment_bytes=int(value["segment.bytes"]),
            segment_ms=min(segment_ms, max_lag) if compacts else segment_ms,
            min_dirty_ratio=float(value["min.cleanable.dirty.ratio"]),
            min_compaction_lag_ms=int(value["min.compaction.lag.ms"]),
            max_compaction_lag_ms=max_lag,
            delete_retention_ms=int(value["delete.retention.ms"]),
        )
