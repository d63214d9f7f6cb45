"""A trainer that kills itself with -9 at a chosen point of a chosen batch: ``killed_trainer.py POINT BATCH ARGUMENTS``.

Points: before-checkpoint, after-checkpoint, in-checkpoint, after-delta (committed in the store, Step not written),
after-step.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from headrace.schemas.records import Rollback
from headrace.trainers import checkpoint, step_log, step_to_delta
from headrace.trainers.__main__ import main


def die(*_: Any) -> None:
    """End at once, like a machine that lost its power."""
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str, due: Callable[..., bool], *, after: bool) -> None:
    """Die before or after the first call of ``owner.name`` for which ``due`` holds."""
    real = getattr(owner, name)

    def call(*positional: Any, **named: Any) -> Any:
        hit = due(*positional, **named)
        if hit and not after:
            die()
        result = real(*positional, **named)
        if hit:
            die()
        return result

    setattr(owner, name, call)


def arm(point: str, batch: int) -> None:
    """Set the trap."""
    folder, log = checkpoint.CheckpointFolder, step_log.StepLog
    if point in ("before-checkpoint", "after-checkpoint"):
        wrap(folder, "write", lambda _s, at, *_: at.batch == batch, after=point.startswith("after"))
    elif point == "in-checkpoint":
        wrap(checkpoint, "_seal", lambda _f, at, _p: at.batch == batch, after=False)
    elif point == "after-delta":
        wrap(step_to_delta.DeltaPublisher, "publish", lambda *_, **named: named["batch"] == batch, after=True)
    elif point == "after-rollback":
        wrap(log, "commit", lambda _s, records, _o: any(isinstance(r, Rollback) for r in records), after=True)
    else:
        wrap(log, "commit", lambda _s, records, _o: batch in [getattr(r, "batch", -1) for r in records], after=True)


if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
