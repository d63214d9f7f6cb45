"""Serves an environment to ``http_env``: ``python -m headrace.pipeline.environments.serve NAME [--options JSON]``.

Goes in: ``POST /reset``, ``/step`` and ``/close``; comes out: observations as JSON. Each episode has an environment of
its own; a step that comes a second time gets the answer of the first.
"""

import argparse
import asyncio
import json
import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from headrace.pipeline.capture.http import Answer, HttpServer, Request
from headrace.pipeline.environments.environment import (
    Environment,
    EnvironmentFailed,
    Observation,
    guarded,
    make_environment,
    observed,
)
from headrace.schemas.parts import Message
from headrace.schemas.records import Prompt

__all__ = ("EnvironmentServer", "main")

_MOST_EPISODES = 1024
_THREADS = 64
"""Calls at a time; one that hangs keeps its thread."""


@dataclass(slots=True)
class _Live:
    environment: Environment
    turn: int
    last: dict[str, Any]


class EnvironmentServer:
    """The episodes of one server; beyond the most, those longest unused end."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name, self._options = name, options
        self._live: OrderedDict[str, _Live] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "environment")
        self._http = HttpServer(self._handle)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        return await self._http.start(host, port)

    async def close(self) -> None:
        """Stop listening."""
        await self._http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _handle(self, request: Request) -> Answer:
        calls = {"/reset": self._reset, "/step": self._step, "/close": self._close}
        call = calls.get(request.path)
        if call is None or request.method != "POST":
            return Answer(404, {"error": f"{request.method} {request.path} is not served"})
        try:
            body = json.loads(request.body)
            return Answer(200, await call(body))
        except KeyError as error:
            return Answer(404, {"error": f"there is no {error}"})
        except (ValueError, TypeError, RecursionError) as error:
            return Answer(400, {"error": f"{type(error).__name__}: {error}"})
        except EnvironmentFailed as error:
            return Answer(422, {"error": str(error)})

    async def _reset(self, body: dict[str, Any]) -> dict[str, Any]:
        given = dict(body["prompt"])
        given["messages"] = [Message(**m) for m in given.get("messages", [])]
        prompt = Prompt(**given)
        environment = make_environment(self._name, self._options)
        seen = await self._called("reset", environment.reset, int(body["seed"]), prompt)
        key = secrets.token_urlsafe(12)
        while len(self._live) >= _MOST_EPISODES:
            key_of_old, old = self._live.popitem(last=False)
            self._locks.pop(key_of_old, None)
            await self._end(old)
        self._live[key] = _Live(environment, 0, {})
        return {**_told(seen), "episode": key, "tools": list(getattr(environment, "tools", None) or [])}

    async def _step(self, body: dict[str, Any]) -> dict[str, Any]:
        key, turn = str(body["episode"]), int(body["turn"])
        async with self._locks.setdefault(key, asyncio.Lock()):
            live = self._live[key]
            self._live.move_to_end(key)
            if turn == live.turn - 1:
                return live.last
            if turn != live.turn:
                raise ValueError(f"turn {turn} was asked for, turn {live.turn} is next")
            seen = await self._called("step", live.environment.step, str(body["action"]))
            live.turn, live.last = turn + 1, _told(seen)
            return live.last

    async def _close(self, body: dict[str, Any]) -> dict[str, Any]:
        live = self._live.pop(str(body["episode"]), None)
        self._locks.pop(str(body["episode"]), None)
        if live is not None:
            await self._end(live)
        return {}

    async def _called(self, what: str, call: Callable[..., Any], *arguments: Any) -> Observation:
        """One call in a thread. Raises EnvironmentFailed."""
        loop = asyncio.get_running_loop()
        value = await loop.run_in_executor(self._threads, guarded, self._name, what, call, *arguments)
        return observed(self._name, what, value)

    async def _end(self, live: _Live) -> None:
        """Close an episode's environment; what that raises is its own affair."""
        loop = asyncio.get_running_loop()
        with suppress(EnvironmentFailed):
            await loop.run_in_executor(self._threads, guarded, self._name, "close", live.environment.close)


def _told(seen: Observation) -> dict[str, Any]:
    return {**asdict(seen), "details": dict(seen.details)}


async def _serve(options: argparse.Namespace) -> None:
    server = EnvironmentServer(options.name, json.loads(options.options))
    make_environment(options.name, json.loads(options.options)).close()
    port = await server.start(options.host, options.port)
    sys.stdout.write(f"ready {port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main(arguments: list[str] | None = None) -> int:
    """Serve until the process is ended; the first line says ``ready PORT``."""
    parser = argparse.ArgumentParser(prog="headrace.pipeline.environments.serve", description=__doc__)
    parser.add_argument("name", help="the environment, by name or as module:Class")
    parser.add_argument("--options", default="{}", help="its options as one JSON object")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    asyncio.run(_serve(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
