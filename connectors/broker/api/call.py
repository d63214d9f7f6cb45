"""One request on its way through the broker, and the two answers that are not bytes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from headrace.connectors.broker.broker import Broker
from headrace.connectors.broker.wire import Body, Reader, Writer


class Later(Enum):
    """What a handler returns when it has no response now."""

    PARKED = "the response comes through Call.reply"
    NONE = "the client wants no response"


class Call:
    """A request: `reader` stands behind the request header; `reply` sends the response of a parked call, once.

    `cancel` is set by a handler that parks and must be told when the client goes away; `hurry`, when the call may be
    answered early because the client has sent another request behind it.
    """

    __slots__ = ("broker", "cancel", "client_id", "hurry", "reader", "reply", "version")

    def __init__(
        self, broker: Broker, version: int, client_id: str, reader: Reader, reply: Callable[[Body], None]
    ) -> None:
        self.broker = broker
        self.version = version
        self.client_id = client_id
        self.reader = reader
        self.reply = reply
        self.cancel: Callable[[], None] | None = None
        self.hurry: Callable[[], None] | None = None

    def writer(self) -> Writer:
        """A writer in the encoding of this call's version."""
        return Writer(self.reader.flexible)

    def throttled_writer(self, since: int) -> Writer:
        """A writer that begins with the throttle time (none), a field of the response since version `since`."""
        out = self.writer()
        if self.version >= since:
            out.int32(0)
        return out


Handler = Callable[[Call], Body | Later]
