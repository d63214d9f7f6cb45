"""The shell of the local broker: sockets, clocks, files, signals; nothing here knows what a request means.

One thread and one selector loop, which serves connections, wakes waiting fetches, lets time pass every 50 ms and gives
compaction what is left. asyncio was left out: it has no way to send part of a file without a task for each response.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import stat
import struct
import sys
import time
import traceback
from types import FrameType

from headrace.connectors.broker.broker import Broker, Times
from headrace.connectors.broker.connection import Connection
from headrace.connectors.broker.wire import MalformedRequest

_SCRATCH = 1 << 16
_TICK = 0.05
_HOUSEKEEPING = 0.01
"""Seconds between two ticks that compaction may take: at most a fifth of the time."""
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


def clocks() -> Times:
    """The time now."""
    return Times(time.monotonic(), time.time_ns() // 1_000_000)


def _parent_gone(parent: int) -> bool:
    """Whether the process that started this one has ended; its pipe tells even when it ended before `parent` was asked
    for.
    """
    if os.getppid() != parent:
        return True
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(0).st_mode)
    except OSError:
        return False
    return is_pipe and bool(select.select([0], [], [], 0)[0]) and not os.read(0, 1 << 12)


class Server:
    """Listens on `host`:`port` (0 chooses a free port) and runs one broker until `stop`.

    Raises `OSError` when the port cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, port), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[Connection] = set()
        self._resumed: list[Connection] = []
        self._stopping = False
        self._started_by = os.getppid()
        self._parent: int | None = None
        self.broker: Broker

    def stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """End `serve` soon; also a signal handler."""
        self._stopping = True

    def serve(self, broker: Broker, exit_with_parent: bool = False) -> None:
        """Answer clients until `stop`, or the death of the parent process if asked."""
        self.broker = broker
        self._parent = self._started_by if exit_with_parent else None
        self._selector.register(self._listener, _READ, None)
        scratch = bytearray(_SCRATCH)
        next_tick = 0.0
        while not self._stopping:
            deadline = broker.waiting.next_deadline()
            wake = next_tick if deadline is None else min(next_tick, deadline)
            events = self._selector.select(max(0.0, wake - time.monotonic()))
            times = broker.times = clocks()
            for key, mask in events:
                if key.data is None:
                    self._accept()
                else:
                    self._guarded(key.data, mask, scratch)
            broker.waiting.answer_marked()
            broker.waiting.expire(times.now)
            if times.now >= next_tick:
                next_tick = times.now + _TICK
                broker.tick(times)
                broker.waiting.answer_marked()
                self._stopping = self._stopping or (self._parent is not None and _parent_gone(self._parent))
                self._housekeep(times.now)
            while self._resumed:
                self._guarded(self._resumed.pop(), 0, scratch)
        self._close()

    def _housekeep(self, now: float) -> None:
        """Spend a part of the time between ticks on compaction."""
        while time.monotonic() - now < _HOUSEKEEPING and self.broker.housekeep():
            pass

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, sock)
        self._connections.add(connection)
        self._selector.register(sock, _READ, connection)

    def _guarded(self, connection: Connection, mask: int, scratch: bytearray) -> None:
        """Serve one connection; whatever a request brings up ends that connection, never the broker."""
        if connection.closed:
            return
        try:
            if mask & _WRITE:
                connection.writable()
            elif mask & _READ:
                connection.readable(scratch)
            else:
                connection.run_waiting()
        except (OSError, EOFError):
            self.drop(connection)
        except (MalformedRequest, struct.error, IndexError, UnicodeDecodeError) as error:
            print(f"closed a connection: {error}", file=sys.stderr, flush=True)
            self.drop(connection)
        except Exception:  # the request seam: a fault in one handler must not take the other clients down
            traceback.print_exc()
            self.drop(connection)

    def watch(self, connection: Connection, events: int) -> None:
        """Wait for other events of a connection."""
        self._selector.modify(connection.socket, events, connection)

    def resume(self, connection: Connection) -> None:
        """Handle a connection's waiting requests after the events at hand."""
        self._resumed.append(connection)

    def drop(self, connection: Connection) -> None:
        """Forget a connection."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._selector.unregister(connection.socket)
            connection.close()

    def _close(self) -> None:
        for connection in list(self._connections):
            self.drop(connection)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.close()
