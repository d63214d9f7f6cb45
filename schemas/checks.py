"""The rules that a record must obey to travel, applied at encode; each breach is an InvalidRecord that names the field.

Rules: the four arrays of a sequence have equal lengths; log-probs, rewards and scores are finite; a trained token has a
version and the oldest of them is the sequence's; reasons, statuses and kinds are of their closed lists (protocol 2).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.schemas.errors import InvalidRecord
from headrace.schemas.parts import Sequence
from headrace.schemas.records import (
    CLOSE_REASONS,
    END_REASONS,
    MEMBER_STATUSES,
    TASK_KINDS,
    Closed,
    EvalResult,
    Group,
    Item,
    Member,
    Partial,
    Record,
    Score,
    Step,
    Task,
    Trajectory,
)

__all__ = ("check_record", "check_sequence", "describe")


def describe(record: Record) -> str:
    """A record's name and identity for messages, such as ``Trajectory group 5 replica 0 attempt 1``."""
    parts = [type(record).__name__]
    for name in ("prompt_id", "policy", "batch", "group", "replica", "attempt", "version", "worker"):
        value = getattr(record, name, None)
        if value is not None:
            parts.append(f"{name.removesuffix('_id')} {value}")
    return " ".join(parts)


def check_record(record: Record) -> None:
    """Raise InvalidRecord when ``record`` may not travel; says which record, which field and what is wrong."""
    rule = _RULES.get(type(record))
    if rule is None:
        return
    try:
        rule(record)
    except InvalidRecord as error:
        raise InvalidRecord(f"{describe(record)}: {error}") from None


def check_sequence(sequence: Sequence) -> None:
    """Raise InvalidRecord when the arrays of a sequence do not fit each other or hold what may not travel."""
    if sequence.sound:
        return
    n = sequence.tokens.size
    logprobs, mask, versions = sequence.logprobs, sequence.mask, sequence.versions
    for name, array in (("logprobs", logprobs), ("mask", mask), ("versions", versions)):
        if array.size != n:
            raise InvalidRecord(
                f"{name} has {array.size} entries for {n} tokens: all four arrays must be of one length"
            )
    if sequence.end_reason not in END_REASONS:
        raise InvalidRecord(f"end_reason {sequence.end_reason!r} is none of {', '.join(END_REASONS)}")
    if not np.logical_and.reduce(np.isfinite(logprobs)):
        at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise InvalidRecord(f"logprobs[{at}] is {logprobs[at]}: log-probs must be finite")
    trained = versions[mask != 0]
    if trained.size:
        oldest = int(np.minimum.reduce(trained))
        if oldest < 0:
            raise InvalidRecord("versions: a token with mask 1 has no policy version")
        if oldest != sequence.oldest_version:
            raise InvalidRecord(f"oldest_version is {sequence.oldest_version}, the tokens say {oldest}")
    sequence.note_sound()


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InvalidRecord(f"{name} is {value}: it must be finite")


def _of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidRecord(f"{name} {value!r} is none of {', '.join(allowed)}")


def _sequences(record: Any) -> None:
    for i, sequence in enumerate(record.sequences):
        try:
            check_sequence(sequence)
        except InvalidRecord as error:
            raise InvalidRecord(f"sequences[{i}].{error}") from None


def _trajectory(record: Any) -> None:
    _finite("reward", record.reward)
    for part in record.rewards:
        _finite(f"rewards[{part.name}]", part.value)
    for name, value in record.metrics.items():
        _finite(f"metrics[{name}]", value)
    _of("status", record.status, ("train", "excluded"))
    _of("end_reason", record.end_reason, END_REASONS)
    _sequences(record)


def _member(record: Any) -> None:
    _finite("raw_reward", record.raw_reward)
    _finite("shaped_reward", record.shaped_reward)
    if isinstance(record, Member):
        _of("status", record.status, MEMBER_STATUSES)
    _sequences(record)


def _score(record: Any) -> None:
    for part in record.scores:
        _finite(f"scores[{part.replica}] {part.name}", part.value)


def _group(record: Any) -> None:
    for name in ("reward_mean", "reward_std", "raw_mean", "raw_std"):
        _finite(name, getattr(record, name))


def _step(record: Any) -> None:
    _finite("loss", record.loss)


_RULES: dict[type, Callable[[Any], None]] = {
    Trajectory: _trajectory,
    Score: _score,
    Partial: _sequences,
    Member: _member,
    Item: _member,
    Group: _group,
    Step: _step,
    Task: lambda record: _of("kind", record.kind, TASK_KINDS),
    Closed: lambda record: _of("reason", record.reason, CLOSE_REASONS),
    EvalResult: lambda record: _finite("reward", record.reward),
}
