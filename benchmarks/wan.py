"""A long, thin line to a server: a proxy that delays every byte by half a round trip and lets through so many a second.

All connections share the line's bandwidth in each direction; a new connection costs a round trip of its own, as TCP's
handshake does. It does not model TCP's slow start: what is measured is round trips and bytes, not congestion.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress


class LongLine:
    """Listens on a port of its own and forwards to ``host``:``port``.

    round_trip: seconds. bandwidth: bytes a second in each direction. idle: seconds after which an unused connection is
    closed, as object stores do (0: never). ``connections`` counts those opened so far, ``downloaded`` the bytes from
    the server.
    """

    def __init__(self, host: str, port: int, round_trip: float, bandwidth: float, idle: float = 0.0) -> None:
        self._target = (host, port)
        self._delay = round_trip / 2
        self._bandwidth = bandwidth
        self._idle = idle
        self._free = {"up": 0.0, "down": 0.0}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="long-line", daemon=True)
        self.connections = 0
        self.downloaded = 0
        self.port = 0

    def __enter__(self) -> LongLine:
        """Open the line."""
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self.port = server.result(10).sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        """Cut it."""

        def end() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_later(0.2, self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        self._thread.join(5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        handshake = time.monotonic() + 2 * self._delay
        used = [time.monotonic()]
        closing = asyncio.ensure_future(self._close_idle(used, far_writer)) if self._idle else None
        with suppress(asyncio.CancelledError):  # The line was cut.
            await asyncio.gather(
                self._pump("up", reader, far_writer, handshake, used),
                self._pump("down", far_reader, writer, 0.0, used),
            )
        if closing is not None:
            closing.cancel()

    async def _close_idle(self, used: list[float], far: asyncio.StreamWriter) -> None:
        """End the server's side of a connection that nobody used for a while."""
        while time.monotonic() - used[0] < self._idle:
            await asyncio.sleep(0.05)
        far.close()

    async def _pump(
        self,
        way: str,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        not_before: float,
        used: list[float],
    ) -> None:
        """Forward one direction: bytes leave when the line is free and arrive half a round trip later."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    target.close()
                    return
                target.write(data)
                await target.drain()

        delivering = asyncio.ensure_future(deliver())
        try:
            while True:
                data = await source.read(16 << 10)
                used[0] = time.monotonic()
                start = max(time.monotonic(), not_before, self._free[way])
                self._free[way] = start + len(data) / self._bandwidth
                self.downloaded += len(data) * (way == "down")
                await under_way.put((self._free[way] + self._delay, data))
                if not data:
                    break
                # The sender feels the line: it cannot run ahead of it by more than a window.
                await asyncio.sleep(max(0.0, self._free[way] - time.monotonic() - 1.0))
            await delivering
        except ConnectionError:
            delivering.cancel()
