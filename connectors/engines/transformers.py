"""The engine for a laptop: any full-attention causal model of transformers, decoded in one batch that never drains.

Goes in: requests; comes out: generations. Finished sequences leave and new ones enter between decode steps; the prompts
of newcomers are run in one padded batch. Computes in float32 on the published bfloat16 weights unless told otherwise,
so its log-probs are those that a trainer recomputes. Keys and values made by older weights are kept, or computed anew
(``recompute``).
"""

import contextlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

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
from headrace.connectors.engines.kv_cache import KeyValueCache
from headrace.connectors.engines.model_weights import ModelWeights, bits_of, tensor_of
from headrace.connectors.engines.rows import Rows, drop_all, drop_waiting
from headrace.connectors.engines.sampling import choose, uniforms
from headrace.connectors.model_folder import ModelFolder
from headrace.schemas.errors import ConfigurationError

__all__ = ("TransformersEngine", "TransformersOptions")


class TransformersOptions(BaseModel):
    """``[rollout.options]`` of this engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; the published weights are bfloat16 either way."""
    prefill_tokens: int = Field(8192, ge=1)
    """Most padded prompt tokens that enter in one step; a longer prompt enters alone."""
    attention: str = "sdpa"
    recompute: bool = False
    """New weights compute the keys and values of running sequences anew; without, they keep those of the old."""


class TransformersEngine:
    """A batch of rows over one model; see ``engine.Engine`` for the methods' promises.

    folder: a Hugging Face model folder; only its configuration is read, weights come by ``load_weights``.
    slots: sequences decoded at once. max_prompt_tokens: longer prompts are refused. threads: of torch, in this process.
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
        import torch

        self._options = options_of(TransformersOptions, "transformers", options)
        torch.set_num_threads(threads)
        self._torch = torch
        model_folder = ModelFolder(folder)
        self._model = _empty_model(model_folder.path, self._options)
        self._weights = ModelWeights(model_folder.path, self._model)
        self._capacity = slots
        self._max_prompt = max_prompt_tokens
        config = self._model.config
        self._context = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
        stops = np.zeros(int(config.vocab_size), np.bool_)
        stops[[i for i in model_folder.stop_token_ids if i < stops.size]] = True
        self._vocabulary = stops.size
        self._cache = KeyValueCache(slots)
        self._rows = Rows(slots, stops, self._context)
        self._waiting: deque[Request] = deque()
        self._prompts: dict[int, npt.NDArray[np.int32]] = {}
        self._paused = False
        self._version = -1

    @property
    def version(self) -> int:
        """Version of the weights in force; -1 before the first."""
        return self._version

    @property
    def capacity(self) -> int:
        """Rows."""
        return self._capacity

    @property
    def active(self) -> int:
        """Running and waiting sequences."""
        return self._rows.count + len(self._waiting)

    def add(self, request: Request) -> None:
        """Take a request. Raises PromptTooLong, or ValueError for a prompt or parameters that it cannot take."""
        refuse_extra(request, "transformers")
        check_request(request, self._max_prompt, self._context, self._vocabulary)
        self._waiting.append(request)

    def step(self) -> list[Generation]:
        """One token for every row; prompts that wait enter first. Raises WeightsRefused before any weights came."""
        if self._version < 0:
            raise WeightsRefused("the engine has no weights: load_weights comes before step")
        torch, rows = self._torch, self._rows
        if self._paused:
            return []
        running = rows.count
        entering = self._next_in()
        if not running and not entering:
            return []
        with torch.inference_mode():
            logits = []
            if running:
                logits.append(self._decode(running))
            if entering:
                logits.append(self._prefill(entering))
            both = logits[0] if len(logits) == 1 else torch.cat(logits)
            now = slice(0, rows.count)
            u = uniforms(rows.seed[now], rows.produced[now] + rows.before[now])
            tokens, logprobs = choose(both, rows.temperature[now], rows.top_p[now], rows.top_k[now], u)
            ends = rows.append(now, tokens, logprobs, self._version)
            ended = np.flatnonzero(ends)
            out = [rows.generation(int(row), int(ends[row])) for row in ended]
            self._free(ended)
        return out

    def abort(self, key: int) -> Generation | None:
        """Drop a request, running or waiting, and return what it has."""
        row = self._rows.find(key)
        if row >= 0:
            partial = self._rows.generation(row, 0)
            with self._torch.inference_mode():
                self._free(np.array([row]))
            return partial
        return drop_waiting(self._waiting, key)

    def abort_all(self) -> list[Generation]:
        """Drop every request and return what they have."""
        self._prompts.clear()
        return self._rows.everyone() + drop_all(self._waiting)

    def pause(self) -> None:
        """Sample nothing until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False

    def load_weights(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Check every tensor, then copy all of them; tied tensors may be given once.

        A version of adapters is added to the weights of the model folder.
        """
        whole = self._weights.whole(weights, version)
        state = self._model.state_dict()
        with self._torch.inference_mode():
            for name, array in whole.items():
                state[name].copy_(tensor_of(array))
            self._version = version
            if self._options.recompute:
                self._recompute()

    def weights(self) -> dict[str, npt.NDArray[np.uint16]]:
        """The weights in force as bfloat16 bits by name, for comparison with what was published."""
        return {name: bits_of(tensor).copy() for name, tensor in self._model.state_dict().items()}

    def close(self) -> None:
        """Drop all requests."""
        self.abort_all()

    def _next_in(self) -> list[Request]:
        """Waiting requests that enter now, in order, within free rows and the padded prefill budget."""
        out: list[Request] = []
        width = 0
        while self._waiting and self._rows.count + len(out) < self._capacity:
            wider = max(width, self._waiting[0].prompt.size)
            if out and wider * (len(out) + 1) > self._options.prefill_tokens:
                break
            width = wider
            out.append(self._waiting.popleft())
        return out

    def _decode(self, n: int) -> Any:
        torch, rows = self._torch, self._rows
        device = self._options.device
        width = int(rows.cached[:n].max()) + 1
        positions = torch.from_numpy(rows.cached[:n].copy()).to(device)
        self._cache.begin_decode(positions, width)
        mask = (torch.arange(width, device=device)[None, :] <= positions[:, None])[:, None, None, :]
        out = self._model(
            torch.from_numpy(rows.last[:n, None].copy()).to(device),
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        rows.cached[:n] += 1
        return out.logits[:, -1]

    def _prefill(self, requests: list[Request]) -> Any:
        torch, rows = self._torch, self._rows
        last = np.array([request.prompt.size - 1 for request in requests])
        kept, where = np.unique(last, return_inverse=True)
        logits = self._fill(rows.count, [request.prompt for request in requests], kept)
        rows.enter(requests)
        if self._options.recompute:
            self._prompts.update((request.key, request.prompt) for request in requests)
        device = self._options.device
        return logits[torch.arange(len(requests), device=device), torch.from_numpy(where).to(device)]

    def _fill(self, first: int, texts: list[npt.NDArray[np.int32]], kept: npt.NDArray[np.int64]) -> Any:
        """Put the keys and values of ``texts`` into rows ``first`` onward; logits after the positions ``kept``."""
        torch, device = self._torch, self._options.device
        width = max(text.size for text in texts)
        ids = np.zeros((len(texts), width), np.int64)
        for line, text in zip(ids, texts, strict=True):
            line[: text.size] = text
        self._cache.begin_prefill(first, width)
        # padding stands on the right, where causality hides it from every real token
        mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
        out = self._model(
            torch.from_numpy(ids).to(device),
            attention_mask=mask,
            position_ids=torch.arange(width, device=device)[None, :].expand(len(texts), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.from_numpy(kept).to(device),
        )
        return out.logits

    def _recompute(self) -> None:
        """Compute the keys and values of the running rows with the weights in force."""
        rows, at = self._rows, 0
        while at < rows.count:
            texts: list[npt.NDArray[np.int32]] = []
            width = 0
            for row in range(at, rows.count):
                prompt = self._prompts[int(rows.keys[row])]
                text = np.concatenate([prompt, rows.tokens(row)])[: int(rows.cached[row])]
                width = max(width, text.size)
                if texts and width * (len(texts) + 1) > self._options.prefill_tokens:
                    break
                texts.append(text)
            self._fill(at, texts, np.array([0]))
            at += len(texts)

    def _free(self, ended: npt.NDArray[np.int64]) -> None:
        if ended.size:
            for key in self._rows.keys[ended]:
                self._prompts.pop(int(key), None)
            source, target = self._rows.leave(ended)
            width = int(self._rows.cached[target].max()) if target.size else 0
            self._cache.move(source, target, width)


def _empty_model(folder: Path, options: TransformersOptions) -> Any:
    """The model of a folder's configuration, its weights not read. Raises ConfigurationError for other attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "use_sliding_window", False):
        raise ConfigurationError(
            f"{folder}: layers of kind {', '.join(sorted(kinds))}; the transformers engine decodes full attention "
            "only, take rollout.engine=vllm for this model"
        )
    with contextlib.suppress(AttributeError):
        config.use_cache = True
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, attn_implementation=options.attention)
    return model.to(options.device, getattr(torch, options.dtype)).eval().requires_grad_(False)
