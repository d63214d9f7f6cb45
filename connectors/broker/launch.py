"""Starts the local broker on a data folder: lock, file limits, start message, and a mark for a clean stop."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import time
from pathlib import Path

from headrace.connectors.broker import kept_index
from headrace.connectors.broker.broker import Broker, BrokerOptions
from headrace.connectors.broker.server import Server, clocks
from headrace.connectors.broker.storage import DiskStorage
from headrace.schemas.errors import ConfigurationError

LIMITS = "single node, loopback only, plaintext, no ACLs, unreplicated, no fsync, classic groups only"
HOST = "127.0.0.1"
_LOCK_SECONDS = 3.0
"""Time in which a broker whose parent was killed notices and lets go of the folder."""


class BrokerStartError(ConfigurationError):
    """The local broker cannot start: its folder is in use or its port is taken."""


def run(
    data: Path,
    port: int,
    auto_create: bool = True,
    default_partitions: int = 4,
    exit_with_parent: bool = False,
    first_join_delay: float = 0.1,
) -> None:
    """Serve until SIGTERM or SIGINT; prints its limits and `ready PORT`. Raises `BrokerStartError`."""
    data.mkdir(parents=True, exist_ok=True)
    lock = _lock(data)
    try:
        _raise_file_limit()
        try:
            server = Server(HOST, port)
        except OSError as error:
            raise BrokerStartError(
                f"port {port} on {HOST} cannot be used: {error.strerror}. Choose another port."
            ) from error
        options = BrokerOptions(HOST, server.port, auto_create, default_partitions, first_join_delay)
        broker = Broker(DiskStorage(data), options, clocks(), kept_index.take(data), _complain)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.stop)
        print(f"local broker: {LIMITS}", flush=True)
        print(f"ready {server.port}", flush=True)
        server.serve(broker, exit_with_parent)
        kept_index.leave(data, (log for _, _, log in broker.topics.logs()))
    finally:
        os.close(lock)


def _lock(data: Path) -> int:
    """Hold the folder for this process; the lock goes with the process, however it ends."""
    path = data / "broker.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    end = time.monotonic() + _LOCK_SECONDS
    while not (held := _try_lock(descriptor)) and time.monotonic() < end:
        time.sleep(0.05)
    if not held:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise BrokerStartError(
            f"{data} is used by another local broker (process {holder}). Stop it or choose another folder."
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _raise_file_limit() -> None:
    """Every segment keeps a descriptor: take as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
