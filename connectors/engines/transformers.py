"""The engine for a laptop: any full-attention causal model of transformers, decoded in one batch that never drains.

Goes in: requests; comes out: generations. Finished sequences leave and new ones enter between decode steps; the prompts
of newcomers are run in one padded batch. Computes in float32 on the published bfloat16 weights unless told otherwise,
so its log-probs are those that a trainer recomputes. Keys and values made by older weights are kept (``keep``).
"""

import contextlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from headrace.connectors.adapters import added, holds_adapters
from headrace.connectors.engines.engine import Generation, PromptTooLong, Request, WeightsRefused, options_of
from headrace.connectors.engines.kv_cache import KeyValueCache
from headrace.connectors.engines.rows import Rows, drop_waiting
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
        self._folder = model_folder.path
        self._base: dict[str, Any] = {}
        self._model = _empty_model(model_folder.path, self._options)
        self._capacity = slots
        self._max_prompt = max_prompt_tokens
        config = self._model.config
        self._context = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
        stops = np.zeros(int(config.vocab_size), np.bool_)
        stops[[i for i in model_folder.stop_token_ids if i < stops.size]] = True
        self._cache = KeyValueCache(slots)
        self._rows = Rows(slots, stops, self._context)
        self._waiting: deque[Request] = deque()
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
        """Take a request. Raises PromptTooLong, or ValueError for an empty prompt."""
        size = request.prompt.size
        most = min(self._max_prompt, self._context - 1)
        if size > most:
            raise PromptTooLong(
                f"the prompt has {size} tokens, at most {most} are taken (rollout.max_prompt_tokens "
                f"{self._max_prompt}, context of the model {self._context}); shorten it or raise the setting"
            )
        if size == 0:
            raise ValueError("the prompt has no token")
        self._waiting.append(request)

    def step(self) -> list[Generation]:
        """One token for every row; prompts that wait enter first. Raises WeightsRefused before any weights came."""
        if self._version < 0:
            raise WeightsRefused("the engine has no weights: load_weights comes before step")
        torch, rows = self._torch, self._rows
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
            u = uniforms(rows.seed[now], rows.produced[now])
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

    def load_weights(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Check every tensor, then copy all of them; tied tensors may be given once.

        A version of adapters is added to the weights of the model folder.
        """
        torch = self._torch
        if holds_adapters(weights):
            self._base = self._base or _folder_weights(self._folder)
            base = self._base
            weights = {**base, **added(weights, base, lambda name: base[name].float().numpy())}
        state = self._model.state_dict()
        seen = {state[name].data_ptr() for name in weights if name in state}
        missing = [name for name, tensor in state.items() if tensor.data_ptr() not in seen]
        unknown = [name for name in weights if name not in state]
        wrong = [
            f"{name} is {weights[name].shape}, the model has {tuple(state[name].shape)}"
            for name in weights
            if name in state and tuple(weights[name].shape) != tuple(state[name].shape)
        ]
        if missing or unknown or wrong:
            raise WeightsRefused(
                f"weights of version {version} do not fit the model: missing {missing[:3]}, unknown {unknown[:3]}, "
                f"shapes {wrong[:3]}; trainer and rollout must name the same model folder"
            )
        with torch.inference_mode():
            for name, array in weights.items():
                state[name].copy_(_tensor(array))
        self._version = version

    def weights(self) -> dict[str, npt.NDArray[np.uint16]]:
        """The weights in force as bfloat16 bits by name, for comparison with what was published."""
        bfloat16 = self._torch.bfloat16
        out = {}
        for name, tensor in self._model.state_dict().items():
            bits = tensor.detach().to(bfloat16).cpu().contiguous().view(self._torch.int16).numpy()
            out[name] = bits.view(np.uint16).copy()
        return out

    def close(self) -> None:
        """Drop all requests."""
        self._waiting.clear()
        self._rows.count = 0

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
        device = self._options.device
        width = max(request.prompt.size for request in requests)
        ids = np.zeros((len(requests), width), np.int64)
        for line, request in zip(ids, requests, strict=True):
            line[: request.prompt.size] = request.prompt
        self._cache.begin_prefill(rows.count, width)
        # padding stands on the right, where causality hides it from every real token
        mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
        last = np.array([request.prompt.size - 1 for request in requests])
        kept, where = np.unique(last, return_inverse=True)
        out = self._model(
            torch.from_numpy(ids).to(device),
            attention_mask=mask,
            position_ids=torch.arange(width, device=device)[None, :].expand(len(requests), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.from_numpy(kept).to(device),
        )
        rows.enter(requests)
        return out.logits[torch.arange(len(requests), device=device), torch.from_numpy(where).to(device)]

    def _free(self, ended: npt.NDArray[np.int64]) -> None:
        if ended.size:
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


def _folder_weights(folder: Path) -> dict[str, Any]:
    """The weights of a model folder as torch tensors, rounded to bfloat16, which is what adapters are trained on."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return {name: p.detach() for name, p in model.named_parameters()}


def _tensor(array: npt.NDArray[Any] | Any) -> Any:
    """A torch tensor of an array whose uint16 entries are the bits of bfloat16 numbers; tensors pass as they are."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    # snapshots are read-only, and torch warns of tensors over memory that must not be written
    own = np.require(array, requirements=["C", "W"])
    if own.dtype == np.uint16:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)
