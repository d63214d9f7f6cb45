"""One client of the local broker: bytes in, whole requests out to the broker, responses back in order.

Requests are read straight into the buffer that is written to the log, and fetched batches go from file to socket by
`sendfile`, so payload bytes never pass through Python. A client that does not read its responses is not served further.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque
from typing import Protocol

from headrace.connectors.broker.api.call import Call
from headrace.connectors.broker.broker import Broker
from headrace.connectors.broker.dispatch import dispatch
from headrace.connectors.broker.storage import FileSlice
from headrace.connectors.broker.wire import Body, MalformedRequest

_LARGEST_REQUEST = 100 << 20
_READ_TURN = 4 << 20
"""Bytes read from one connection before the others get their turn."""
_PIECES = 64
"""Pieces of responses sent in one call."""
_MSG_MORE = getattr(socket, "MSG_MORE", 0)
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Shell(Protocol):
    """What a connection needs of the loop that drives it."""

    broker: Broker

    def watch(self, connection: Connection, events: int) -> None:
        """Wait for other events of a connection."""

    def resume(self, connection: Connection) -> None:
        """Handle a connection's waiting requests after the events at hand."""

    def drop(self, connection: Connection) -> None:
        """Forget a connection."""


class Connection:
    """One client: partly read requests, requests that wait for their turn, and bytes that wait for the socket."""

    def __init__(self, shell: Shell, sock: socket.socket) -> None:
        self._shell = shell
        self.socket = sock
        self._head = bytearray()
        self._frame: bytearray | None = None
        self._filled = 0
        self._waiting: deque[bytearray] = deque()
        self._owed: Call | None = None
        self._out: deque[bytes | bytearray | memoryview | FileSlice] = deque()
        self._events = _READ
        self._running = False
        self.closed = False

    # ---- reading

    def readable(self, scratch: bytearray) -> None:
        """Take what the socket has; raises `OSError` or `EOFError` when the client is gone."""
        taken = 0
        while taken < _READ_TURN and not self.closed:
            try:
                size, expected = self._receive(scratch)
            except BlockingIOError:
                return
            if size == 0:
                raise EOFError
            taken += size
            self.run_waiting()
            if size < expected:
                return

    def _receive(self, scratch: bytearray) -> tuple[int, int]:
        """One system call; returns (bytes read, bytes there was room for)."""
        frame = self._frame
        if frame is not None:
            with memoryview(frame) as view:
                size = self.socket.recv_into(view[self._filled :])
            expected = len(frame) - self._filled
            self._filled += size
            if self._filled == len(frame):
                self._waiting.append(frame)
                self._frame = None
            return size, expected
        size = self.socket.recv_into(scratch)
        self._split(memoryview(scratch)[:size])
        return size, len(scratch)

    def _split(self, data: memoryview) -> None:
        """Cut received bytes into requests; the last may be incomplete."""
        position = 0
        if self._head:
            position = min(4 - len(self._head), len(data))
            self._head += data[:position]
        while True:
            if len(self._head) == 4:
                size = int.from_bytes(self._head)
                self._head.clear()
            elif not self._head and len(data) - position >= 4:
                size = int.from_bytes(data[position : position + 4])
                position += 4
            else:
                self._head += data[position:]
                return
            if not 8 <= size <= _LARGEST_REQUEST:
                raise MalformedRequest(f"a request of {size} bytes")
            piece = data[position : position + size]
            position += len(piece)
            frame = bytearray(size) if len(piece) < size else bytearray(piece)
            if len(piece) < size:
                frame[: len(piece)] = piece
                self._frame, self._filled = frame, len(piece)
                return
            self._waiting.append(frame)

    def run_waiting(self) -> None:
        """Handle complete requests, one after the other, and send their responses together.

        A parked fetch gives way to the request behind it; other parked requests hold the line.
        """
        while self._waiting and self._events == _READ and not self.closed:
            self._running = True
            try:
                go_on = self._handle_some()
            finally:
                self._running = False
            if self._out:
                self._flush()
            if not go_on:
                return

    def _handle_some(self) -> bool:
        """Handle requests until none is left or enough is to be sent; false when a parked request holds the line."""
        while self._waiting and len(self._out) < _PIECES:
            if self._owed is not None:
                if self._owed.hurry is None:
                    return False
                self._owed.hurry()
                continue
            request = self._waiting.popleft()
            self._owed = dispatch(self._shell.broker, memoryview(request), self._send)
        return True

    # ---- writing

    def _send(self, pieces: Body) -> None:
        self._owed = None
        if self.closed:
            return
        self._out.extend(pieces)
        if self._running:
            return
        try:
            self._flush()
        except OSError:
            self._shell.drop(self)
            return
        if self._waiting:
            self._shell.resume(self)

    def _flush(self) -> None:
        out = self._out
        try:
            while out:
                first = out[0]
                if isinstance(first, FileSlice):
                    self._send_slice(first)
                else:
                    self._send_bytes()
        except BlockingIOError:
            pass
        self._watch(_WRITE if out else _READ)

    def _send_bytes(self) -> None:
        """Send the byte pieces at the front in one call, and keep what did not fit."""
        out = self._out
        pieces: list[bytes | bytearray | memoryview] = []
        for piece in out:
            if isinstance(piece, FileSlice):
                break
            pieces.append(piece)
            if len(pieces) == _PIECES:
                break
        sent = self.socket.sendmsg(pieces, [], _MSG_MORE if len(out) > len(pieces) else 0)
        for piece in pieces:
            if sent < len(piece):
                out[0] = memoryview(piece)[sent:]
                return
            sent -= len(piece)
            out.popleft()

    def _send_slice(self, piece: FileSlice) -> None:
        source = piece.file.fileno()
        if source < 0:
            self._out[0] = piece.file.read(piece.position, piece.size)
            return
        sent = os.sendfile(self.socket.fileno(), source, piece.position, piece.size)
        if sent == 0:
            raise OSError(f"the file ends before byte {piece.position + piece.size}")
        if sent < piece.size:
            self._out[0] = FileSlice(piece.file, piece.position + sent, piece.size - sent)
        else:
            self._out.popleft()

    def writable(self) -> None:
        """The socket takes bytes again."""
        self._flush()
        self.run_waiting()

    def _watch(self, events: int) -> None:
        """Read while nothing waits to be sent, else only write: a client that does not read is not served further."""
        if events != self._events:
            self._events = events
            self._shell.watch(self, events)

    def close(self) -> None:
        """Forget the client."""
        self.closed = True
        if self._owed is not None and self._owed.cancel is not None:
            self._owed.cancel()
        self._owed = None
        self._out.clear()
        self.socket.close()
