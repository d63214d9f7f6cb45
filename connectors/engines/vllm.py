"""The engine ``vllm``: vLLM's AsyncLLM, in processes of its own, behind the stepped contract of ``engine``.

Goes in: requests as token ids; comes out: generations with the log-prob and the version of every token. Its event loop
has a thread here; ``step`` only collects what has ended. Log-probs are vLLM's processed ones, those of the distribution
that was sampled from; versions are the labels that vLLM puts on every batch of tokens, which change only while it is
paused for new weights. The model's generation_config is never applied.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
)
from headrace.connectors.engines.event_thread import EventThread
from headrace.connectors.engines.model_weights import ModelWeights, bits_of
from headrace.connectors.engines.vllm_settings import RAISES, VllmOptions, parameters
from headrace.connectors.engines.vllm_start import start
from headrace.connectors.engines.vllm_weights import HandOver, cache_salt, install_async
from headrace.connectors.model_folder import ModelFolder

__all__ = ("VllmEngine",)

_PATIENCE = 0.01
"""Longest wait of a step for something to end, in seconds."""
_DIED = "vLLM has died: what it wrote above says why; start the worker again"

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Running:
    """A request inside.

    number: under which vLLM knows it. gate: opens when it may enter vLLM or has to leave. entered: it is in vLLM.
    begun: it has a token of this stay. again: its salt is old, so it leaves and enters once more. stopped: it is
    dropped.
    """

    request: Request
    number: int
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    entered: bool = False
    begun: bool = False
    again: bool = False
    stopped: bool = False
    parts: list[Generation] = field(default_factory=list)

    def made(self) -> int:
        return sum(part.tokens.size for part in self.parts)


class VllmEngine:
    """See ``engine.Engine`` for the methods' promises, and ``VllmOptions``.

    folder: a Hugging Face model folder; vLLM reads its configuration, weights come by ``load_weights``. slots:
    sequences that vLLM decodes at once. threads: of the process that computes, on CPU. Equal seeds give equal tokens as
    far as vLLM's numerics do not depend on the batch. Raises ConfigurationError when vLLM is missing or does not start.
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
        self._options = options_of(VllmOptions, "vllm", options)
        model_folder = ModelFolder(folder)
        self._stops = list(model_folder.stop_token_ids)
        self._slots = slots
        self._max_prompt = max_prompt_tokens
        self._version = -1
        self._number = 0
        self._inside: dict[int, _Running] = {}
        self._ended = Ended()
        self._fault: EngineFailed | None = None
        self._paused = False
        self._open = False
        """Whether requests may enter vLLM; written in the loop's thread."""
        self._salted = -1
        """Version under whose salt they enter."""
        self._llm: Any = None
        self._hand_over = HandOver(verify=self._options.verify)
        self._thread = EventThread("vllm")
        with ExitStack() as unless_it_starts:
            unless_it_starts.callback(self.close)
            self._llm = self._thread.call(start(model_folder.path, slots, threads, self._options))
            self._weights = ModelWeights.of_folder(model_folder.path)
            unless_it_starts.pop_all()
        self._context = int(self._llm.vllm_config.model_config.max_model_len)
        self._vocabulary = int(self._llm.vllm_config.model_config.get_vocab_size())

    @property
    def version(self) -> int:
        """Version of the weights in force; -1 before the first."""
        return self._version

    @property
    def capacity(self) -> int:
        """Sequences that vLLM decodes at once."""
        return self._slots

    @property
    def active(self) -> int:
        """Requests inside, those that have ended and were not returned included."""
        return len(self._inside)

    def add(self, request: Request) -> None:
        """Take a request. Raises PromptTooLong, ValueError for what vLLM would not sample as asked, EngineFailed."""
        self._raise_fault()
        check_request(request, self._max_prompt, self._context, self._vocabulary)
        parameters(request, 0, self._stops)
        running = _Running(request, self._number)
        self._number += 1
        self._inside[request.key] = running
        self._thread.soon(self._begin, running)

    def step(self) -> list[Generation]:
        """What has ended, waiting a moment for the first."""
        if self._version < 0:
            raise WeightsRefused("the engine has no weights: load_weights comes before step")
        if not self._inside:
            return []
        out = self._ended.take(0.0 if self._paused else _PATIENCE)
        self._raise_fault()
        for generation in out:
            del self._inside[generation.key]
        return out

    def abort(self, key: int) -> Generation | None:
        """Drop a request and return what it has."""
        if key not in self._inside:
            return None
        self._ask(self._dropped([self._inside[key]]))
        self._raise_fault()
        del self._inside[key]
        return self._ended.pop(key)

    def abort_all(self) -> list[Generation]:
        """Drop every request and return what they have."""
        self._ask(self._dropped(list(self._inside.values())))
        self._raise_fault()
        self._inside.clear()
        return self._ended.take()

    def pause(self) -> None:
        """Sample nothing until ``resume``."""
        if not self._paused:
            self._paused = True
            self._ask(self._held())

    def resume(self) -> None:
        """Go on."""
        if self._paused:
            self._paused = False
            self._ask(self._released())

    def load_weights(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Check every tensor, then change what differs while vLLM stands still."""
        self._raise_fault()
        whole = self._weights.whole(weights, version)
        if self._options.dtype != "float32":
            whole = {name: bits_of(array) for name, array in whole.items()}
        else:
            whole = {name: a if isinstance(a, np.ndarray) else bits_of(a) for name, a in whole.items()}
        self._ask(self._installed(whole, version))
        self._version = version

    def loaded_digests(self) -> dict[str, str]:
        """xxh3-128 of every tensor as vLLM has it loaded, in checkpoint coordinates, by name."""
        held = self._hand_over.held
        shapes = {name: list(array.shape) for name, array in held.items()}
        dtypes = {name: "bfloat16" if a.dtype == np.uint16 else a.dtype.name for name, a in held.items()}
        found: list[dict[str, str]] = self._ask(self._llm.collective_rpc("loaded_digests", args=(shapes, dtypes)))
        return found[0]

    def close(self) -> None:
        """End vLLM's processes."""
        llm, self._llm = self._llm, None
        if llm is not None:
            self._thread.call(_shut_down(llm))
        self._thread.close()
        self._hand_over.close()

    # ------------------------------------------------------------------------------------ in the owner's thread

    def _ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for what runs in the loop's thread. Raises EngineFailed when vLLM is dead."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return self._thread.call(coroutine)
        except EngineDeadError as error:
            self._fault = EngineFailed(f"{_DIED} ({error})")
            raise self._fault from error

    def _raise_fault(self) -> None:
        if self._fault is None and self._llm.errored:
            self._fault = EngineFailed(_DIED)
        if self._fault is not None:
            raise self._fault

    # ------------------------------------------------------------------------------------ in the loop's thread

    def _begin(self, running: _Running) -> None:
        running.task = asyncio.create_task(self._sampled(running))

    async def _sampled(self, running: _Running) -> None:
        """Sample a request to its end; what vLLM raises ends this request, or the engine when that is dead."""
        from vllm.exceptions import VLLMError
        from vllm.v1.engine.exceptions import EngineDeadError

        request, reason, error = running.request, "abort", ""
        try:
            while await self._may_enter(running):
                reason = await self._part(running)
                if reason != "abort" or not running.again:
                    break
        except EngineDeadError as failure:
            self._fault = EngineFailed(f"{_DIED} ({failure})")
        except (VLLMError, *RAISES) as failure:
            error = f"vLLM refused the request: {type(failure).__name__}: {failure}"
        if reason not in ("stop", "length", "abort"):
            error = error or f"vLLM ended the request with {reason!r}"
        if error:
            reason = "abort"
        full = request.prompt.size + running.made() >= self._context
        if reason == "length" and full and request.made + running.made() < request.sampling.max_new_tokens:
            reason = "context_full"
        parts = running.parts or [Generation(request.key, "abort")]
        self._ended.put(
            Generation(
                request.key,
                reason,
                np.concatenate([part.tokens for part in parts]),
                np.concatenate([part.logprobs for part in parts]),
                np.concatenate([part.versions for part in parts]),
                error=error,
            )
        )

    async def _may_enter(self, running: _Running) -> bool:
        """Wait until requests may enter vLLM; false when this one is dropped instead."""
        while not (self._open or running.stopped):
            running.gate.clear()
            await running.gate.wait()
        return not running.stopped

    async def _part(self, running: _Running) -> str:
        """Sample until the end or until the request is dropped; says how it ended."""
        from vllm.inputs.engine import tokens_input

        request, completion = running.request, None
        ids = request.prompt.tolist()
        for part in running.parts:
            ids += part.tokens.tolist()
        given = tokens_input(ids, cache_salt=cache_salt(self._salted) if self._options.prefix_cache else None)
        asked = parameters(request, running.made(), self._stops)
        running.entered, running.begun, running.again = True, False, False
        try:
            async for output in self._llm.generate(given, asked, str(running.number)):
                running.begun, completion = True, output.outputs[0]
        finally:
            running.entered = False
        assert completion is not None, "vLLM ended a request without a word"
        running.parts.append(_generation(request.key, completion))
        return str(completion.finish_reason)

    async def _dropped(self, running: list[_Running]) -> None:
        """Drop requests; what they have is in the queue when this returns."""
        for one in running:
            one.stopped = True
            one.gate.set()
        await self._out(running)
        await asyncio.gather(*(one.task for one in running if one.task is not None))

    async def _out(self, running: list[_Running]) -> None:
        """Have vLLM drop requests, and again where one was just entering."""
        while left := [str(one.number) for one in running if one.entered]:
            await self._llm.abort(left)
            await asyncio.sleep(0 if len(left) == 1 else 0.001)

    def _admit(self) -> None:
        self._open = True
        for one in list(self._inside.values()):
            one.gate.set()

    async def _held(self) -> None:
        self._open = False
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def _released(self) -> None:
        if self._hand_over.version >= 0:
            await self._llm.resume_generation()
            self._admit()

    async def _installed(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Put a version in force.

        Where keys and values are kept, requests without a token enter anew under the salt of this version: what the
        prefix cache has was computed by the version before. Where they are not, vLLM empties that cache.
        """
        self._open = False
        try:
            if self._options.prefix_cache and not self._options.recompute:
                fresh = [one for one in list(self._inside.values()) if one.entered and not one.begun]
                for one in fresh:
                    one.again = True
                await self._out(fresh)
            how = {"recompute": self._options.recompute, "resume": not self._paused}
            await install_async(self._llm, self._hand_over, weights, version, **how)
            self._salted = version
        finally:
            if self._hand_over.version >= 0 and not self._paused:
                self._admit()


def _generation(key: int, completion: Any) -> Generation:
    """What vLLM gives for one sequence. Raises RuntimeError when it has no label for some token."""
    tokens = np.array(completion.token_ids, np.int32)
    flat = completion.logprobs
    logprobs = np.array([flat.logprobs[at] for at in flat.start_indices[: tokens.size]], np.float32)
    versions = np.full(tokens.size, -1, np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if logprobs.size != tokens.size or (tokens.size and int(versions.min()) < 0):
        raise RuntimeError(f"vLLM gave {tokens.size} tokens, {logprobs.size} log-probs, versions {versions.tolist()}")
    return Generation(key, "", tokens, logprobs, versions)


async def _shut_down(llm: Any) -> None:
    llm.shutdown()
