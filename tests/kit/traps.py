"""Points at which a trainer kills itself with -9 or stands still: ``arm(POINT, BATCH)`` in its process.

before-checkpoint, in-checkpoint, after-checkpoint; after-delta (committed in the store, Step not written); after-step;
before-upload, after-upload (of this rank's objects of the version numbered BATCH); after-rollback; stall (for 12 s,
with the Step of the batch in an open transaction).
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from headrace.connectors.transaction import Transaction
from headrace.schemas.codec import decode
from headrace.schemas.records import Rollback, Step
from headrace.trainers import (
    checkpoint_folder,
    checkpoint_saver,
    sharded_publisher,
    step_log,
    step_to_delta,
    version_share,
    versions,
)

STALL_SECONDS = 12.0
"""Longer than the transaction timeout."""


def die() -> None:
    """End at once, like a machine that lost its power."""
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str, due: Callable[..., bool], act: Callable[[], None], *, after: bool) -> None:
    """Act before or after the first call of ``owner.name`` for which ``due`` holds."""
    real, left = getattr(owner, name), [1]

    def call(*positional: Any, **named: Any) -> Any:
        hit = bool(left) and due(*positional, **named)
        if hit:
            left.clear()
        if hit and not after:
            act()
        result = real(*positional, **named)
        if hit and after:
            act()
        return result

    setattr(owner, name, call)


def arm(point: str, batch: int) -> None:
    """Set the trap."""
    log = step_log.StepLog

    def writes(kind: type, batch: int) -> Callable[..., bool]:
        return lambda _s, records, _o: any(isinstance(r, kind) and getattr(r, "batch", batch) == batch for r in records)

    if point == "before-checkpoint":
        wrap(checkpoint_saver.Checkpoints, "save", lambda _s, at, *_: at.batch == batch, die, after=False)
    elif point in ("in-checkpoint", "after-checkpoint"):
        after = point.startswith("after")
        wrap(checkpoint_folder.FolderPlace, "commit", lambda _s, _a, table: table.batch == batch, die, after=after)
    elif point == "after-delta":
        for publisher in (step_to_delta.DeltaPublisher, sharded_publisher.ShardedPublisher):
            wrap(publisher, "publish", lambda *_, **named: named["batch"] == batch, die, after=True)
    elif point in ("before-upload", "after-upload"):
        after = point.startswith("after")
        wrap(version_share.VersionShare, "upload", lambda _s, draft: draft.version == batch, die, after=after)
    elif point == "after-rollback":
        wrap(log, "commit", writes(Rollback, batch), die, after=True)
    elif point == "after-step":
        wrap(log, "commit", writes(Step, batch), die, after=True)
    elif point == "stall":
        wrap(Transaction, "produce", lambda _s, _t, value, *_: step_of(value) == batch, stall, after=True)
    else:
        raise ValueError(point)


def cut_segments(nbytes: int) -> None:
    """Cut images into segments of so many bytes, so that ranks share a small model too."""
    real = versions.Layout.of
    versions.Layout = SimpleNamespace(of=partial(real, segment_bytes=nbytes))  # type: ignore[misc,assignment]


def step_of(value: bytes | None) -> int:
    """The batch of a Step in a value, -1 for anything else."""
    record = decode(value) if value else None
    return record.batch if isinstance(record, Step) else -1


def stall() -> None:
    """Stand still."""
    time.sleep(STALL_SECONDS)
