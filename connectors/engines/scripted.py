"""An engine without a model: lengths, latencies and failures from a script, for tests and simulation.

Goes in: requests; comes out: tokens that follow from seed and prompt alone, with log-probs of a uniform distribution
and true version labels. Time passes by ``wait``, so a simulation hands in its own clock.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from headrace.connectors.engines.engine import (
    Generation,
    Request,
    WeightsRefused,
    check_request,
    options_of,
    refuse_extra,
)
from headrace.connectors.engines.rows import Rows, drop_all, drop_waiting
from headrace.connectors.engines.sampling import uniforms

__all__ = ("ScriptedEngine", "ScriptedOptions")

_VOCABULARY = 64
_STOP = 2
_FIRST_WORD = 4


class ScriptedOptions(BaseModel):
    """``[rollout.options]`` of this engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_seconds: float = Field(0.0, ge=0)
    """Time of one decode step."""
    row_seconds: float = Field(0.0, ge=0)
    """Further time of a step for each running sequence."""
    mean_length: float = Field(8.0, ge=1)
    """Tokens of a completion, the stop token included, drawn from a log-normal distribution."""
    sigma: float = Field(0.5, ge=0)
    """Spread of the lengths' logarithm."""
    nan_share: float = Field(0.0, ge=0, le=1)
    """Share of sequences that end with a log-prob that is no number."""
    context: int = Field(1 << 30, ge=2)
    """Most tokens of prompt plus completion."""


class ScriptedEngine:
    """See ``engine.Engine``; ``load_weights`` takes any weights and looks at none."""

    def __init__(
        self,
        folder: Path | str = "",
        *,
        slots: int = 64,
        max_prompt_tokens: int = 1024,
        threads: int = 1,
        options: Mapping[str, Any] | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options_of(ScriptedOptions, "scripted", options)
        self._slots = slots
        self._max_prompt = max_prompt_tokens
        self._wait = wait
        stops = np.zeros(_VOCABULARY, np.bool_)
        stops[_STOP] = True
        self._context = self._options.context
        self._rows = Rows(slots, stops, self._context)
        self._waiting: deque[Request] = deque()
        self._paused = False
        self._version = -1

    @property
    def version(self) -> int:
        """Version in force."""
        return self._version

    @property
    def capacity(self) -> int:
        """Rows."""
        return self._slots

    @property
    def active(self) -> int:
        """Running and waiting sequences."""
        return self._rows.count + len(self._waiting)

    def add(self, request: Request) -> None:
        """Take a request. Raises PromptTooLong."""
        refuse_extra(request, "scripted")
        check_request(request, self._max_prompt, self._context)
        self._waiting.append(request)

    def step(self) -> list[Generation]:
        """One token for every row after the step's time has passed."""
        if self._version < 0:
            raise WeightsRefused("the engine has no weights: load_weights comes before step")
        rows, options = self._rows, self._options
        if self._paused:
            return []
        room = self._slots - rows.count
        rows.enter([self._waiting.popleft() for _ in range(min(room, len(self._waiting)))])
        if not rows.count:
            return []
        if pause := options.step_seconds + options.row_seconds * rows.count:
            self._wait(pause)
        now = slice(0, rows.count)
        made, seeds = rows.produced[now] + rows.before[now], rows.seed[now]
        words = uniforms(seeds, made) * (_VOCABULARY - _FIRST_WORD) + _FIRST_WORD
        last = made + 1 >= self._lengths(seeds)
        tokens = np.where(last, _STOP, words.astype(np.int32)).astype(np.int32)
        broken = last & (uniforms(seeds, np.full_like(made, -2)) < options.nan_share)
        logprobs = np.where(broken, np.nan, -math.log(_VOCABULARY)).astype(np.float32)
        ends = rows.append(now, tokens, logprobs, self._version)
        rows.cached[now] += 1
        ended = np.flatnonzero(ends)
        out = [rows.generation(int(row), int(ends[row])) for row in ended]
        rows.leave(ended)
        return out

    def abort(self, key: int) -> Generation | None:
        """Drop a request and return what it has."""
        row = self._rows.find(key)
        if row >= 0:
            partial = self._rows.generation(row, 0)
            self._rows.leave(np.array([row]))
            return partial
        return drop_waiting(self._waiting, key)

    def abort_all(self) -> list[Generation]:
        """Drop every request and return what they have."""
        return self._rows.everyone() + drop_all(self._waiting)

    def pause(self) -> None:
        """Sample nothing and let no time pass until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False

    def load_weights(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Label tokens with ``version`` from here on."""
        self._version = version

    def close(self) -> None:
        """Drop all requests."""
        self.abort_all()

    def _lengths(self, seeds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of the completions with these seeds: log-normal with the mean asked for, by Box and Muller."""
        u, v = uniforms(seeds, np.full_like(seeds, -3)), uniforms(seeds, np.full_like(seeds, -4))
        normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
        sigma = self._options.sigma
        drawn = np.exp(math.log(self._options.mean_length) - sigma**2 / 2 + sigma * normal)
        lengths: npt.NDArray[np.int64] = np.maximum(1, np.rint(drawn)).astype(np.int64)
        return lengths
