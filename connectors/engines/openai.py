"""The engine ``openai``: any endpoint that speaks OpenAI's API, for inference only.

Goes in: requests; comes out: generations, read from streams so that one that is dropped keeps its beginning. The
weights are the endpoint's own affair: what it sampled may be trained only where it is said to serve a version of the
policy (``options.version``) and gives the ids and log-probs of its tokens; all else is marked as not known.
"""

import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.connectors.engines.ended import Ended
from headrace.connectors.engines.engine import (
    EngineFailed,
    Generation,
    Request,
    WeightsRefused,
    check_request,
    options_of,
    refuse_extra,
)
from headrace.connectors.engines.openai_stream import EndpointRefused, OpenAIOptions, Streamed
from headrace.connectors.model_folder import ModelFolder
from headrace.schemas.errors import ConfigurationError

__all__ = ("OpenAIEngine",)

_PATIENCE = 0.01
"""Longest wait of a step for something to end, in seconds."""


class OpenAIEngine:
    """See ``engine.Engine`` and ``OpenAIOptions``; each of ``slots`` requests has a connection of its own.

    folder: the policy's model folder, for its tokenizer and stop tokens. ``load_weights`` takes any weights and looks
    at none; ``pause`` holds new requests back, while the endpoint goes on with those that it has.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        slots: int = 64,
        max_prompt_tokens: int = 1024,
        threads: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = options_of(OpenAIOptions, "openai", options)
        self._folder = ModelFolder(folder)
        self._folder.tokenize("")  # a folder without a tokenizer is refused here
        self._key = os.environ.get(self._options.key_env, "") if self._options.key_env else ""
        if "@" in self._options.url.rpartition("://")[2].partition("/")[0]:
            raise ConfigurationError("rollout.options.url holds a login; name its variable in rollout.options.key_env")
        self._slots = slots
        self._max_prompt = max_prompt_tokens
        self._loaded = -1
        self._inside: dict[int, Streamed] = {}
        self._futures: dict[int, Future[None]] = {}
        self._ended = Ended()
        self._fault: EngineFailed | None = None
        self._going = Event()
        self._going.set()
        self._pool = ThreadPoolExecutor(slots, "openai")

    @property
    def version(self) -> int:
        """The version that the endpoint is said to serve, else the one handed over last; -1 before the first."""
        return self._options.version if self._options.version >= 0 and self._loaded >= 0 else self._loaded

    @property
    def capacity(self) -> int:
        """Requests that are with the endpoint at once."""
        return self._slots

    @property
    def active(self) -> int:
        """Requests inside."""
        return len(self._inside)

    def add(self, request: Request) -> None:
        """Take a request. Raises PromptTooLong, ValueError for ``extra`` parameters, EngineFailed."""
        self._raise_fault()
        refuse_extra(request, "openai")
        check_request(request, self._max_prompt, self._options.context)
        streamed = Streamed(request, self._options, self._folder, self._key)
        self._inside[request.key] = streamed
        self._futures[request.key] = self._pool.submit(self._play, streamed)

    def step(self) -> list[Generation]:
        """What has ended, waiting a moment for the first."""
        if self._loaded < 0:
            raise WeightsRefused("the engine has no weights: load_weights comes before step")
        out = self._ended.take(_PATIENCE) if self._inside else []
        self._raise_fault()
        for generation in out:
            del self._inside[generation.key], self._futures[generation.key]
        return out

    def abort(self, key: int) -> Generation | None:
        """Close the request's connection and return what has come."""
        streamed = self._inside.pop(key, None)
        if streamed is None:
            return None
        if not self._drop(streamed):
            streamed.over.wait()
        del self._futures[key]
        return self._ended.pop(key)

    def abort_all(self) -> list[Generation]:
        """Close every connection and return what has come."""
        dropped = [streamed for streamed in self._inside.values() if not self._drop(streamed)]
        for streamed in dropped:
            streamed.over.wait()
        self._inside.clear()
        self._futures.clear()
        return self._ended.take()

    def pause(self) -> None:
        """Send no further request until ``resume``."""
        self._going.clear()

    def resume(self) -> None:
        """Go on."""
        self._going.set()

    def load_weights(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Take note of a version; the endpoint has weights of its own."""
        self._loaded = version

    def close(self) -> None:
        """Close every connection."""
        self._going.set()
        self.abort_all()
        self._pool.shutdown()

    def _drop(self, streamed: Streamed) -> bool:
        """Close a request's connection; true when it had none yet, and so has ended here."""
        if self._futures[streamed.request.key].cancel():
            self._ended.put(Generation(streamed.request.key, "abort"))
            return True
        streamed.drop()
        return False

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _play(self, streamed: Streamed) -> None:
        """One request from its first byte to its end, in a thread of the pool."""
        try:
            while not (self._going.wait(0.1) or streamed.dropped.is_set()):
                pass
            streamed.run()
        finally:  # whatever happened, somebody waits for the request
            failure = sys.exception()
            if isinstance(failure, EndpointRefused) and failure.login:
                self._fault = EngineFailed(str(failure))
            self._ended.put(self._generation(streamed, failure))
            streamed.over.set()

    def _generation(self, streamed: Streamed, failure: BaseException | None) -> Generation:
        error = ""
        if failure is not None:
            named = "" if isinstance(failure, EndpointRefused) else f"{self._options.url}: {type(failure).__name__}: "
            error = f"{named}{failure}"
        ids, logprobs = streamed.ids, streamed.logprobs
        key, temperature = streamed.request.key, streamed.request.sampling.temperature
        exact = streamed.exact and (temperature == 1 or self._options.processed_logprobs)
        if not streamed.exact:
            ids = self._folder.tokenize(streamed.said()).tolist()
            logprobs = [0.0] * len(ids)
        known = exact and self._options.version >= 0
        return Generation(
            key,
            "abort" if error else streamed.end_reason,
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            np.full(len(ids), self._options.version if known else -1, np.int32),
            known=known,
            error=error,
        )
