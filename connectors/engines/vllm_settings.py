"""What a user may set of vLLM, and what of a request it is asked to sample.

Goes in: options and sampling parameters of ours; comes out: vLLM's, with nothing that it would change silently.
"""

import json
import zlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.connectors.engines.engine import Request

__all__ = ("RAISES", "VllmOptions", "parameters")

RAISES = (ValueError, TypeError, RuntimeError, OSError, AttributeError, LookupError, AssertionError)
"""What vLLM raises beside errors of its own."""

_LEAST_TEMPERATURE = 0.01
"""vLLM raises a lower one to this."""
_EXTRA = frozenset(
    {
        "min_tokens", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "structured_outputs",
    }
)  # fmt: skip
"""What ``Sampling.extra`` may ask for, by vLLM's names."""


class VllmOptions(BaseModel):
    """``[rollout.options]`` of this engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What the model computes in; the published weights are bfloat16 either way."""
    max_model_len: int = Field(0, ge=0)
    """Most tokens of prompt plus completion; 0: what the model was made for."""
    kv_cache_bytes: int = Field(0, ge=0)
    """Memory for keys and values; 0: 256 MB on CPU, vLLM's share of the memory elsewhere."""
    recompute: bool = False
    """New weights compute the keys and values of running sequences anew; without, they keep those of the old."""
    prefix_cache: bool = True
    """Share the keys and values of equal beginnings of prompts sampled by one version."""
    verify: Literal["never", "first", "always"] = "first"
    """Which updates are read back and compared by digest: none, whole ones, or all."""
    tokenizer: bool = False
    """Load the tokenizer, which JSON schemas and ``bad_words`` need."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs by their names."""


def parameters(request: Request, more: int, stops: list[int]) -> Any:
    """vLLM's parameters for the rest of a request of which ``more`` tokens were sampled beyond ``request.made``.

    stops: token ids that end a sequence. Raises ValueError where vLLM would sample otherwise than asked.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    sampling, made = request.sampling, request.made + more
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"vLLM samples at {_LEAST_TEMPERATURE} where {sampling.temperature} is asked for; use 0")
    extra = json.loads(sampling.extra) if sampling.extra else {}
    if unknown := set(extra) - _EXTRA:
        raise ValueError(f"engine vllm cannot apply {', '.join(sorted(unknown))}; it knows {', '.join(sorted(_EXTRA))}")
    seed = sampling.seed
    if seed >= 0 and made:  # vLLM counts from the start of what it is given
        seed = zlib.crc32(f"{seed} {made}".encode())
    try:
        if "structured_outputs" in extra:
            extra["structured_outputs"] = StructuredOutputsParams(**extra["structured_outputs"])
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens - made,
            seed=seed if seed >= 0 else None,
            stop_token_ids=stops,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            stream_interval=1 << 30,  # only the first token and the whole are told
            **extra,
        )
    except (VLLMClientError, TypeError) as error:
        raise ValueError(f"vLLM does not take {sampling}: {error}") from error
