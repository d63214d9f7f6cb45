"""Answers that repeat another one are not trained: within their group, and within the last groups of the task.

Two members of a policy are the same when the digest of prompt id, roles, tokens and trained positions of all their
sequences is. The first replica is trained, the others stay in the statistics. With ``window`` the digests of the
answers of that many groups are kept, so that a prompt that comes again is not trained on what it was trained on a
moment ago. The memory is that of one task, which is one partition of groups. Arrays that lie in the object store are
not compared. Put it behind other filters: what passes here is remembered, even if a later operator drops it.
"""

from collections import Counter
from hashlib import blake2b
from typing import ClassVar

import numpy as np
from pydantic import Field

from headrace.pipeline.operators.masking import Action, mask_or_drop
from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext
from headrace.schemas.records import Member

__all__ = ("Dedup", "DedupConfiguration", "digest_of")

DIGEST_BYTES = 16
_NEXT = b"next"
_GROUP = b"group/"


class DedupConfiguration(OperatorConfiguration):
    """``window``: groups whose answers are remembered; 0 compares within a group only. ``action``: ``mask`` repeated
    members, or ``drop`` the group for one.
    """

    window: int = Field(0, ge=0, le=100_000)
    action: Action = "mask"


def digest_of(member: Member) -> bytes:
    """16 bytes that say what was sampled; empty when the member carries no arrays."""
    if not member.sequences:
        return b""
    digest = blake2b(f"{member.policy}/{member.prompt_id}".encode(), digest_size=DIGEST_BYTES)
    for sequence in member.sequences:
        digest.update(f"/{sequence.role}/{len(sequence.tokens)}/".encode())
        digest.update(np.ascontiguousarray(sequence.tokens, "<i4").tobytes())
        digest.update(np.ascontiguousarray(sequence.mask, "u1").tobytes())
    return digest.digest()


class Dedup:
    """Trains no answer twice; the reasons are ``repeated_in_group`` and ``repeated_in_window``."""

    kind: ClassVar[Kind] = "filter"
    Configuration: ClassVar[type[OperatorConfiguration]] = DedupConfiguration

    def __init__(self, configuration: DedupConfiguration) -> None:
        self._given = configuration
        self._remembered: Counter[bytes] = Counter()
        self._first = self._next = 0

    def open(self, context: OperatorContext) -> None:
        """Read the digests of the window."""
        self._remembered = Counter()
        entries = list(context.store().scan(_GROUP))
        for _, value in entries:
            self._remembered.update(_split(value))
        self._next = int(context.store().get(_NEXT) or 0)
        self._first = int(entries[0][0][len(_GROUP) :]) if entries else self._next

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """Mask or drop repeats, then remember what is left."""
        reasons: dict[int, str] = {}
        fresh: list[bytes] = []
        for member in record.trained():
            digest = digest_of(member)
            if not digest:
                context.metrics.count("members_not_compared", operator="dedup")
            elif digest in self._remembered:
                reasons[member.replica] = "repeated_in_window"
            elif digest in fresh:
                reasons[member.replica] = "repeated_in_group"
            else:
                fresh.append(digest)
        if self._given.window and fresh and not (reasons and self._given.action == "drop"):
            self._remember(fresh, context)
        mask_or_drop(record, reasons, self._given.action, "dedup", context)

    def _remember(self, digests: list[bytes], context: OperatorContext) -> None:
        store = context.store()
        store.put(_key(self._next), b"".join(digests))
        self._next += 1
        store.put(_NEXT, str(self._next).encode())
        self._remembered.update(digests)
        while self._first < self._next - self._given.window:
            self._remembered -= Counter(_split(store.get(_key(self._first)) or b""))
            store.delete(_key(self._first))
            self._first += 1

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """Nothing: there are no timers."""

    def close(self) -> None:
        """Forget the view."""
        self._remembered = Counter()


def _key(number: int) -> bytes:
    return _GROUP + b"%020d" % number


def _split(value: bytes) -> list[bytes]:
    return [value[i : i + DIGEST_BYTES] for i in range(0, len(value), DIGEST_BYTES)]
