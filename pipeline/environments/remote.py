"""The environment ``http_env``: episodes that live in a server elsewhere, such as a container with its own tools.

Goes in: calls; comes out: what the server's ``POST /reset``, ``/step`` and ``/close`` answer. Every step has its
number, so that a call which is repeated because its answer was lost is not done twice.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from typing import Any

from pydantic import Field

from headrace.pipeline.environments.environment import EnvironmentOptions, Observation
from headrace.schemas.records import Prompt

__all__ = ("RemoteEnvironment", "RemoteOptions", "prompt_of")


class RemoteOptions(EnvironmentOptions):
    """Options of ``http_env``."""

    url: str
    """Of the server, without the name of a call."""
    call_seconds: float = Field(25.0, gt=0)
    """Time for one try; below the workflow's ``step_seconds``."""
    tries: int = Field(3, ge=1)
    """Tries of a call that a lost connection or a status from 500 on ended."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers."""


class RemoteEnvironment:
    """See the module."""

    Options = RemoteOptions

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._episode = ""
        self._turn = 0
        self.tools: list[dict[str, Any]] = []
        """What the server offered at the reset."""

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """Begin an episode in the server."""
        found = self._call("reset", {"seed": seed, "prompt": prompt_of(prompt)})
        self._episode, self._turn, self.tools = str(found["episode"]), 0, list(found.get("tools") or [])
        return _observation(found)

    def step(self, action: str) -> Observation:
        """Act in the server's episode. Raises ValueError after the end."""
        if not self._episode:
            raise ValueError("the episode has ended: call reset first")
        seen = _observation(self._call("step", {"episode": self._episode, "turn": self._turn, "action": action}))
        self._turn += 1
        if seen.done:
            self._episode = ""
        return seen

    def close(self) -> None:
        """Tell the server that the episode has ended; a server that is gone needs not to be told."""
        episode, self._episode = self._episode, ""
        if episode:
            try:
                self._sent("close", {"episode": episode})
            except (OSError, http.client.HTTPException, ValueError):
                return

    def _call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        for number in range(self._options.tries):
            try:
                return self._sent(name, body)
            except urllib.error.HTTPError as error:
                said = error.read(300).decode("utf-8", "replace")
                problem = f"status {error.code}: {said}"
                if error.code < 500:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if number + 1 < self._options.tries:
                time.sleep(min(5.0, 0.2 * 2**number))
        raise RuntimeError(f"{self._options.url}/{name}: {problem}")

    def _sent(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._options.url.rstrip('/')}/{name}",
            data=json.dumps(body).encode("ascii"),
            headers={"Content-Type": "application/json", **self._options.headers},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=self._options.call_seconds) as answer:
            found = json.load(answer)
        if not isinstance(found, dict):
            raise ValueError(f"the answer is no JSON object: {str(found)[:100]}")
        return found


def prompt_of(prompt: Prompt) -> dict[str, Any]:
    """A prompt as JSON."""
    return asdict(prompt)


def _observation(found: dict[str, Any]) -> Observation:
    agent = found.get("agent", "")
    return Observation(
        str(found["text"]),
        float(found.get("reward", 0.0)),
        bool(found.get("done", False)),
        {str(k): str(v) for k, v in (found.get("details") or {}).items()},
        agent if agent in ("begin", "end") else "",
    )
