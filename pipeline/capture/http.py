"""HTTP/1.1 for one purpose: JSON requests of a few clients on one machine, in the event loop of the worker.

Goes in: a handler of (method, path, headers, body); comes out: a listening server. Connections are kept open; an answer
is one JSON object or a stream of server-sent events.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ("Answer", "HttpServer", "Request")

_MOST_HEADERS = 64 << 10
_MOST_BODY = 64 << 20
_IDLE_SECONDS = 300.0
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
            413: "Content Too Large", 422: "Unprocessable Content", 500: "Internal Server Error"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """A request. ``headers`` have names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: a JSON object, or with ``events`` a stream that ends with ``[DONE]``."""

    status: int
    content: Any = None
    events: Sequence[Any] = field(default_factory=tuple)


class _Refused(Exception):
    """A request that cannot be read; the connection ends after the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer:
    """Serves until ``close``; the handler answers everything, errors included."""

    def __init__(self, handler: Callable[[Request], Awaitable[Answer]]) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=_MOST_HEADERS)
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def close(self) -> None:
        """End all connections, running requests included."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            pass  # the client is gone, or this server ends: either way the connection does
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                request = await asyncio.wait_for(_read(reader, writer), _IDLE_SECONDS)
            except _Refused as error:
                message = {"error": {"message": str(error), "type": "invalid_request_error", "code": None}}
                _write(writer, Answer(error.status, message), keep=False)
                await writer.drain()
                return
            if request is None:
                return
            answer = await self._answered(request, reader)
            if answer is None:
                return
            keep = request.headers.get("connection", "").lower() != "close"
            _write(writer, answer, keep=keep)
            await writer.drain()
            if not keep:
                return

    async def _answered(self, request: Request, reader: asyncio.StreamReader) -> Answer | None:
        """The handler's answer; None when the client left meanwhile, and then the handler is cancelled."""
        answering = asyncio.ensure_future(self._handler(request))
        try:
            while not answering.done():
                await asyncio.wait([answering], timeout=1.0)
                if not answering.done() and reader.at_eof():
                    return None
            return answering.result()
        finally:
            if not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    """The next request; None when the client is done. Raises _Refused."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(413, f"the headers are longer than {_MOST_HEADERS} bytes") from None
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refused(400, f"{first[:80]!r} is no request line of HTTP/1.1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return Request(words[0], words[1], headers, await _body(reader, headers))


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = bytearray()
        while size := _size(await reader.readuntil(b"\r\n"), 16):
            if len(body) + size > _MOST_BODY:
                raise _Refused(413, f"the body is larger than {_MOST_BODY} bytes")
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers say nothing that is used
        return bytes(body)
    length = _size(headers.get("content-length", "0").encode("latin-1"), 10)
    if length > _MOST_BODY:
        raise _Refused(413, f"the body has {length} bytes, at most {_MOST_BODY} are taken")
    return await reader.readexactly(length) if length else b""


def _size(text: bytes, base: int) -> int:
    try:
        size = int(text.split(b";")[0].strip(), base)
    except ValueError:
        size = -1
    if size < 0:
        raise _Refused(400, f"{text[:40]!r} is no length")
    return size


def _write(writer: asyncio.StreamWriter, answer: Answer, *, keep: bool) -> None:
    connection = "keep-alive" if keep else "close"
    head = f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Status')}\r\nConnection: {connection}\r\n"
    if not answer.events:
        content = _json(answer.content)
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode("ascii") + content)
        return
    head += "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    content = b"".join(b"data: " + _json(event) + b"\n\n" for event in answer.events) + b"data: [DONE]\n\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode("ascii") + content)


def _json(value: Any) -> bytes:
    # ascii, so that half a surrogate pair in sampled text can travel too
    return json.dumps(value, ensure_ascii=True).encode("ascii")
