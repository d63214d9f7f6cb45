"""The local broker of a run folder: started, awaited, and found again when it runs already.

Used by the launcher for the whole run, and by commands that read a finished run for as long as they read.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.launch.parts import broker_part
from headrace.pipeline.launch.supervisor import Supervisor
from headrace.schemas.errors import HeadraceError

__all__ = ("BrokerNotReady", "broker_of", "forget_live", "live_bootstrap", "note_live", "start_broker")

_START_SECONDS = 60.0


class BrokerNotReady(HeadraceError):
    """The local broker did not say that it is ready."""


def start_broker(supervisor: Supervisor, data: Path, meanwhile: Callable[[], None] = lambda: None) -> str:
    """Start the local broker under a supervisor and return its address.

    A broker that dies is started again on the same port. ``meanwhile`` is called while it starts. Raises
    BrokerNotReady, PartFailed.
    """
    log = supervisor.log_of("broker")
    seen = log.stat().st_size if log.exists() else 0
    supervisor.start(broker_part(data, 0))
    meanwhile()
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        supervisor.check()
        text = log.read_bytes()[seen:].decode("utf-8", "replace") if log.exists() else ""
        ready = next((line for line in text.splitlines(keepends=True) if line.startswith("ready ")), "")
        if ready.endswith("\n"):
            port = int(ready.split()[1])
            supervisor.replace(broker_part(data, port))
            return f"127.0.0.1:{port}"
        time.sleep(0.02)
    raise BrokerNotReady(f"the local broker over {data} is not ready after {_START_SECONDS:g} s; see {log}")


def note_live(folder: RunFolder, bootstrap: str) -> None:
    """Leave the address of the running broker in the run folder."""
    (folder.path / "live.json").write_text(json.dumps({"bootstrap": bootstrap, "launcher": os.getpid()}), "utf-8")


def forget_live(folder: RunFolder) -> None:
    """Take the note away."""
    (folder.path / "live.json").unlink(missing_ok=True)


def live_bootstrap(folder: RunFolder) -> str:
    """The address of the broker of a run that runs now, empty when none does."""
    try:
        note = json.loads((folder.path / "live.json").read_text("utf-8"))
        os.kill(int(note["launcher"]), 0)
        return str(note["bootstrap"])
    except PermissionError:  # alive, of another user
        return str(note["bootstrap"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return ""


@contextmanager
def broker_of(folder: RunFolder, bootstrap: str = "", meanwhile: Callable[[], None] = lambda: None) -> Iterator[str]:
    """The address under which a run's topics can be read: the one given, configured or live, else a broker over the
    run folder's data that is started here and ended afterwards; ``meanwhile`` is called while that starts.
    """
    address = bootstrap or folder.read_config().kafka.bootstrap or live_bootstrap(folder)
    if address:
        yield address
        return
    supervisor = Supervisor(folder.logs, max_restarts=2, window_seconds=60)
    try:
        yield start_broker(supervisor, folder.broker, meanwhile)
    finally:
        supervisor.stop(["broker"], grace_seconds=10)
