"""Faults that a test makes on purpose: small disks that can be filled, long or short variants, a watched worker.

``LONG`` is set by the environment variable HEADRACE_LONG_FAULTS: then outages last as long as they do on a cluster,
with the settings as they are shipped; else timeouts are scaled down, so that a short outage still outlasts them.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toy_worker import Chain

from headrace.pipeline.runtime.stage import Context, Received

LONG = bool(os.environ.get("HEADRACE_LONG_FAULTS"))
SCALED: dict[str, str] = {} if LONG else {"transaction.timeout.ms": "1500", "session.timeout.ms": "1000"}
"""Client settings under which an outage of 3 s is a long one."""


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """A folder with a file system of its own. Raises PermissionError where none can be mounted."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk to its last byte; returns the file to delete."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return filler


class Inside(Chain):
    """A chain that tells when a record of a wanted number was folded: its transaction is open then."""

    number = 0
    reached = threading.Event()

    def process(self, received: Received, context: Context) -> None:
        super().process(received, context)
        if getattr(received.record, "group", -1) >= self.number:
            self.reached.set()

    @classmethod
    def at(cls, number: int) -> type[Inside]:
        """A class of its own, for one test."""
        return type("InsideAt", (cls,), {"number": number, "reached": threading.Event()})
