"""The process in which a verifiers environment lives: many episodes at once, in one event loop.

Goes in: pickled ("play", number, row, base URL) and ("cancel", number), one a frame; comes out: ("ready", error text)
once, then (number, Played) for each episode that ended, with an empty error unless it counts nowhere. What an
environment prints goes to standard error, what it reads is empty; when the parent dies, the calls end and this process
with all that the environment started exits.
"""

import asyncio
import queue
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import IO, Any

from headrace.connectors.verifiers import Package, Played, guarded, open_package, read_description
from headrace.pipeline.rewards.child import connected, write_frame
from headrace.schemas.errors import ConfigurationError

__all__ = ("main",)


class _Frames(queue.Queue[Any]):
    """What the reading thread puts in comes out in the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Called by the reading thread."""
        self._loop.call_soon_threadsafe(self._ready.put_nowait, item)

    async def next(self) -> Any:
        """The next call."""
        return await self._ready.get()


async def _serve(path: Path) -> None:
    """Answer calls until they end."""
    frames = _Frames()
    out = connected(frames)
    async with AsyncExitStack() as stack:
        try:
            package = open_package(read_description(path))
            with guarded("it cannot be served"):
                await stack.enter_async_context(package.serving())
        except ConfigurationError as error:
            write_frame(out, ("ready", str(error)))
            return
        write_frame(out, ("ready", ""))
        await _answer(package, frames, out)


async def _answer(package: Package, frames: _Frames, out: IO[bytes]) -> None:
    running: dict[int, asyncio.Task[None]] = {}
    while True:
        what, number, *rest = await frames.next()
        if what == "play":
            running[number] = asyncio.create_task(_play(package, number, rest[0], rest[1], out))
            running[number].add_done_callback(lambda _, number=number: running.pop(number, None))  # type: ignore[misc]
        elif number in running:
            running[number].cancel()


async def _play(package: Package, number: int, row: Any, base_url: str, out: IO[bytes]) -> None:
    try:
        with guarded("it raised"):
            played = await package.play(row, base_url)
    except asyncio.CancelledError:
        played = Played(error="cancelled")
    except ConfigurationError as error:
        played = Played(error=str(error))
    write_frame(out, (number, played))


def main(arguments: list[str]) -> int:
    """``python -m headrace.pipeline.capture.verifiers_child DESCRIPTION``."""
    asyncio.run(_serve(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
