"""An event loop in a thread of its own, for engines whose libraries are asynchronous and whose owner steps."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ("EventThread",)

T = TypeVar("T")


class EventThread:
    """Runs coroutines; it ends with ``close`` or with the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for what it returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def soon(self, what: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the loop's thread, in the order of these calls, without waiting."""
        self._loop.call_soon_threadsafe(what, *arguments)

    def close(self) -> None:
        """End what runs, then the thread."""
        if self._thread.is_alive():
            self.call(self._cancelled())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
        self._loop.close()

    async def _cancelled(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
