"""From the bytes of one request to the bytes of its response: header, version check, handler."""

from __future__ import annotations

import struct
from collections.abc import Callable

from headrace.connectors.broker.api.call import Call, Later
from headrace.connectors.broker.api.table import TABLE, versions
from headrace.connectors.broker.broker import Broker
from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.storage import FileSlice
from headrace.connectors.broker.wire import Body, MalformedRequest, Reader

_HEADER = struct.Struct(">hhi")
_RESPONSE = struct.Struct(">ii")
Send = Callable[[Body], None]


def dispatch(broker: Broker, request: memoryview, send: Send) -> Call | None:
    """Handle one request (without its length); `send` gets the framed response, now or later.

    Returns the call while its response is owed, None when it is done. Raises `MalformedRequest` (or what `wire.Reader`
    raises) when the bytes are not a request that is served; the connection should then be closed.
    """
    reader = Reader(request)
    key, version, correlation = reader.unpack(_HEADER)
    client_id = reader.string()
    served = TABLE.get(key)
    if served is None or not served.low <= version <= served.high:
        if key == Api.API_VERSIONS:
            _send(versions(Code.UNSUPPORTED_VERSION, 0), correlation, False, send)
            return None
        raise MalformedRequest(f"request {key} version {version} of client {client_id!r} is not served")
    reader.flexible = version >= served.flexible
    reader.tags()
    tagged = reader.flexible and key != Api.API_VERSIONS
    done = False

    def reply(body: Body) -> None:
        nonlocal done
        done = True
        _send(body, correlation, tagged, send)

    call = Call(broker, version, client_id, reader, reply)
    answer = served.handler(call)
    if answer is Later.PARKED:
        return None if done else call
    if not isinstance(answer, Later):
        _send(answer, correlation, tagged, send)
    return None


def _send(body: Body, correlation: int, tagged: bool, send: Send) -> None:
    size = 4 + tagged
    for piece in body:
        size += piece.size if isinstance(piece, FileSlice) else len(piece)
    header = _RESPONSE.pack(size, correlation)
    send([header + b"\0" if tagged else header, *body])
