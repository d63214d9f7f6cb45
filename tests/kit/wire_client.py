"""A client of the local broker that speaks the protocol in bytes, without a socket and in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.connectors.broker.api.call import Call
from headrace.connectors.broker.api.table import TABLE
from headrace.connectors.broker.broker import Broker
from headrace.connectors.broker.codes import Api
from headrace.connectors.broker.dispatch import dispatch
from headrace.connectors.broker.storage import FileSlice
from headrace.connectors.broker.wire import Body, Reader, Writer

Write = Callable[[Writer], None]


def versions_of(api: Api) -> range:
    """Every version of a request that the broker says it serves."""
    return range(TABLE[api].low, TABLE[api].high + 1)


class WireClient:
    """Sends requests with a header of their own; `answers` has the responses that have come, oldest first."""

    def __init__(self, broker: Broker, client_id: str | None = "test") -> None:
        self.broker = broker
        self.client_id = client_id
        self.answers: list[Reader] = []
        self.correlation = 0

    def send(self, api: Api, version: int, write: Write | None = None) -> Call | None:
        """Hand over one request; returns the call when its response is owed."""
        self.correlation += 1
        out = Writer()
        out.int16(api)
        out.int16(version)
        out.int32(self.correlation)
        out.string(self.client_id)
        flexible = version >= TABLE[api].flexible
        out.flexible = flexible
        out.tags()
        if write is not None:
            write(out)
        asked = self.correlation

        def received(body: Body) -> None:
            data = b"".join(p.file.read(p.position, p.size) if isinstance(p, FileSlice) else bytes(p) for p in body)
            assert int.from_bytes(data[:4]) == len(data) - 4, "the response's own length"
            assert int.from_bytes(data[4:8]) == asked, "the correlation id of the request"
            reader = Reader(memoryview(data), flexible, 8)
            if api != Api.API_VERSIONS:
                reader.tags()
            self.answers.append(reader)

        return dispatch(self.broker, memoryview(out.buffer), received)

    def sent(self, api: Api, version: int, write: Write | None = None) -> Reader:
        """Send a request that is answered at once; its response."""
        before = len(self.answers)
        assert self.send(api, version, write) is None
        assert len(self.answers) == before + 1, "one response at once"
        return self.answers[-1]

    @contextmanager
    def asked(self, api: Api, version: int, write: Write | None = None) -> Iterator[Reader]:
        """The response to a request; every byte of it must have been read at the end of the block."""
        reader = self.sent(api, version, write)
        yield reader
        assert_read(reader)


def assert_read(reader: Reader) -> None:
    """Fail unless a response was read to its last byte."""
    assert reader.position == len(reader.data), f"{len(reader.data) - reader.position} bytes follow the response"
