"""A client that speaks the Kafka protocol field by field, to see exact error codes of a broker."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from types import TracebackType

from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.wire import Reader, Writer

Body = Callable[[Writer], None]


class RawClient:
    """One connection; requests are answered one by one. Use as a context manager."""

    def __init__(self, bootstrap: str) -> None:
        host, port = bootstrap.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self._number = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def request(self, api: Api, version: int, body: Body, flexible: bool = False) -> Reader:
        """Send one request and return a reader at the start of the response body."""
        self.send(api, version, body, flexible)
        return self.receive(flexible)

    def send(self, api: Api, version: int, body: Body, flexible: bool = False) -> None:
        """Send one request without waiting."""
        self._number += 1
        out = Writer()
        out.int16(api)
        out.int16(version)
        out.int32(self._number)
        out.string("raw")
        out.flexible = flexible
        out.tags()
        body(out)
        self.socket.sendall(struct.pack(">i", len(out.buffer)) + out.buffer)

    def receive(self, flexible: bool = False) -> Reader:
        """Wait for the next response."""
        size = int.from_bytes(self._exactly(4))
        reader = Reader(memoryview(self._exactly(size)), flexible)
        reader.int32()
        reader.tags()
        return reader

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise EOFError("the broker closed the connection")
            data += piece
        return data

    # ---- requests that several tests need

    def init_producer(self, name: str | None = None) -> tuple[int, int]:
        """(producer id, epoch); repeats while the coordinator is busy."""

        def body(out: Writer) -> None:
            out.string(name)
            out.int32(30_000)

        for _ in range(200):
            reader = self.request(Api.INIT_PRODUCER_ID, 0, body)
            reader.int32()
            code = reader.int16()
            if code == Code.NONE:
                return reader.int64(), reader.int16()
        raise AssertionError(f"no producer id: {code}")

    def produce(self, topic: str, batch: bytes | bytearray, name: str | None = None) -> tuple[Code, int]:
        """(code, base offset) of one batch into partition 0; repeats while the topic is too new to have a leader."""
        answer = self._produce(topic, batch, name)
        while answer[0] in {Code.NOT_LEADER_OR_FOLLOWER, Code.UNKNOWN_TOPIC_OR_PARTITION}:
            time.sleep(0.05)
            answer = self._produce(topic, batch, name)
        return answer

    def _produce(self, topic: str, batch: bytes | bytearray, name: str | None) -> tuple[Code, int]:

        def body(out: Writer) -> None:
            out.string(name)
            out.int16(-1)
            out.int32(10_000)
            out.length(1)
            out.string(topic)
            out.length(1)
            out.int32(0)
            out.blob(bytes(batch))

        reader = self.request(Api.PRODUCE, 7, body)
        reader.int32()
        reader.string()
        reader.int32()
        reader.int32()
        return Code(reader.int16()), reader.int64()

    def commit_offset(
        self, group: str, topic: str, offset: int, generation: int = -1, member: str = "", instance: str | None = None
    ) -> Code:
        """OffsetCommit of partition 0."""

        def body(out: Writer) -> None:
            out.string(group)
            out.int32(generation)
            out.string(member)
            out.string(instance)
            out.length(1)
            out.string(topic)
            out.length(1)
            out.int32(0)
            out.int64(offset)
            out.int32(-1)
            out.string("")

        reader = self.request(Api.OFFSET_COMMIT, 7, body)
        reader.int32()
        reader.int32()
        reader.string()
        reader.int32()
        reader.int32()
        return Code(reader.int16())

    def fetch_offset(self, group: str, topic: str, stable: bool) -> tuple[int, Code]:
        """(offset, code) of partition 0."""

        def body(out: Writer) -> None:
            out.string(group)
            out.length(1)
            out.string(topic)
            out.array([0], out.int32)
            out.tags()
            out.int8(stable)
            out.tags()

        reader = self.request(Api.OFFSET_FETCH, 7, body, flexible=True)
        reader.int32()
        reader.length()
        reader.string()
        reader.length()
        reader.int32()
        offset = reader.int64()
        reader.int32()
        reader.string()
        return offset, Code(reader.int16())

    def add_offset(
        self,
        name: str,
        producer: tuple[int, int],
        group: str,
        topic: str,
        offset: int,
        generation: int = -1,
        member: str = "",
    ) -> Code:
        """AddOffsetsToTxn and TxnOffsetCommit of partition 0; the first code that is not NONE."""

        def announce(out: Writer) -> None:
            out.string(name)
            out.int64(producer[0])
            out.int16(producer[1])
            out.string(group)

        reader = self.request(Api.ADD_OFFSETS_TO_TXN, 0, announce)
        reader.int32()
        code = Code(reader.int16())
        if code is not Code.NONE:
            return code

        def commit(out: Writer) -> None:
            out.string(name)
            out.string(group)
            out.int64(producer[0])
            out.int16(producer[1])
            out.int32(generation)
            out.string(member)
            out.string(None)
            out.length(1)
            out.string(topic)
            out.length(1)
            out.int32(0)
            out.int64(offset)
            out.int32(-1)
            out.string("")
            out.tags()
            out.tags()
            out.tags()

        reader = self.request(Api.TXN_OFFSET_COMMIT, 3, commit, flexible=True)
        reader.int32()
        reader.length()
        reader.string()
        reader.length()
        reader.int32()
        return Code(reader.int16())

    def end_transaction(self, name: str, producer: tuple[int, int], commit: bool) -> Code:
        """EndTxn."""

        def body(out: Writer) -> None:
            out.string(name)
            out.int64(producer[0])
            out.int16(producer[1])
            out.int8(commit)

        reader = self.request(Api.END_TXN, 0, body)
        reader.int32()
        return Code(reader.int16())
