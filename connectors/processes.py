"""Processes and ports of this machine as a person asks about them: is that still mine, who holds this port.

Answers come from the system, never from a memory of what was started: a pid may be stale and belong to another program
by now. Linux answers fully; elsewhere ``ps`` is asked, and the holder of a port stays unnamed.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ("await_command", "command_of", "end_processes", "holder_of", "is_free")

_LISTEN = "0A"


def command_of(pid: int) -> str:
    """The command line of a running process, words separated by spaces; empty when there is none (or a zombie)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        if Path("/proc/self").exists():
            return ""
    try:
        done = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def await_command(process: subprocess.Popen[bytes]) -> None:
    """Return once a process just started shows its command line or has ended.

    For a moment after its exec it shows none, and ``command_of`` would take it for dead.
    """
    while process.poll() is None and not command_of(process.pid):
        time.sleep(0.001)


def is_free(port: int) -> bool:
    """Whether a server can listen on this port of 127.0.0.1 now."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def holder_of(port: int) -> str:
    """Who listens on a TCP port, as ``pid N (command)``; empty when it cannot be told."""
    sockets = {inode for table in ("/proc/net/tcp", "/proc/net/tcp6") for inode in _listening(table, port)}
    if not sockets:
        return ""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(handle.readlink()) in sockets for handle in (process / "fd").iterdir()):
                return f"pid {process.name} ({command_of(int(process.name))[:80]})"
        except OSError:
            continue
    return ""


def _listening(table: str, port: int) -> list[str]:
    try:
        lines = Path(table).read_text("ascii").splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [f"socket:[{row[9]}]" for row in rows if row[3] == _LISTEN and int(row[1].rsplit(":", 1)[1], 16) == port]


def end_processes(pids: Sequence[int], grace_seconds: float) -> list[int]:
    """End process groups led by these pids: SIGTERM to all, SIGKILL to those left; returns those that were killed."""
    for pid in pids:
        _send(pid, signal.SIGTERM)
    left = _wait(pids, grace_seconds)
    for pid in left:
        _send(pid, signal.SIGKILL)
    _wait(left, grace_seconds)
    return left


def _wait(pids: Sequence[int], seconds: float) -> list[int]:
    end = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if command_of(pid)]
        if left:
            time.sleep(0.05)
    return left


def _send(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:  # macOS says so of a group whose leader is a zombie
        pass
