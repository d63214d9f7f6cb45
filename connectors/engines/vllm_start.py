"""Starts vLLM as a rollout engine: its environment, its arguments, and what is said when it does not start.

Goes in: a model folder and options; comes out: an AsyncLLM without weights. Nothing here imports vLLM before it is
asked to start.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.connectors.engines.vllm_settings import RAISES, VllmOptions
from headrace.connectors.engines.vllm_weights import BACKEND, engine_arguments, starting
from headrace.schemas.errors import ConfigurationError

__all__ = ("OWN", "start")

OWN = {
    "model": "policies.P.model",
    "dtype": "rollout.options.dtype",
    "max_model_len": "rollout.options.max_model_len",
    "max_num_seqs": "rollout.slots",
    "kv_cache_memory_bytes": "rollout.options.kv_cache_bytes",
    "enable_prefix_caching": "rollout.options.prefix_cache",
    "skip_tokenizer_init": "rollout.options.tokenizer",
    "generation_config": "",
    "override_generation_config": "",
    "logprobs_mode": "",
    "load_format": "",
    "worker_extension_cls": "",
    "weight_transfer_config": "",
    "speculative_config": "",
}
"""Arguments of vLLM that are set here, with the setting that they come from; without one they are fixed."""
_CPU_CACHE_BYTES = 256 << 20


async def start(folder: Path, slots: int, threads: int, options: VllmOptions) -> Any:
    """An AsyncLLM in the running event loop. Raises ConfigurationError, saying what to do."""
    for name in options.arguments:
        if name in OWN:
            instead = f"set {OWN[name]}" if OWN[name] else "log-probs and versions would not be true of the policy"
            raise ConfigurationError(f"rollout.options.arguments.{name} cannot be given: {instead}")
    with _environment(threads):
        return await _started(folder, slots, options)


async def _started(folder: Path, slots: int, options: VllmOptions) -> Any:
    try:
        from vllm import AsyncEngineArgs
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.exceptions import VLLMError
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigurationError(
            f"rollout.engine=vllm needs vLLM, which cannot be imported: {error}; install headrace[rollout], or "
            "headrace[rollout-cpu] on a machine without a GPU"
        ) from error
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": options.dtype,
        "max_num_seqs": slots,
        "enable_prefix_caching": options.prefix_cache,
        "skip_tokenizer_init": not options.tokenizer,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": 0,
        **engine_arguments(),
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }
    if options.max_model_len:
        arguments["max_model_len"] = options.max_model_len
    if current_platform.is_cpu():
        # compiling takes longer than short runs, and small batches gain nothing by it
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        arguments |= {"enforce_eager": True, "block_size": 32}
    if cache := options.kv_cache_bytes or (_CPU_CACHE_BYTES if current_platform.is_cpu() else 0):
        arguments["kv_cache_memory_bytes"] = cache
    try:
        with starting():
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**arguments, **options.arguments}))
        await llm.collective_rpc("follow_owner", args=(os.getpid(),))
    except (VLLMError, *RAISES) as error:
        raise ConfigurationError(
            f"vLLM does not start for {folder}: {type(error).__name__}: {error}; what it wrote above says more. "
            "Settings of its own are rollout.options (max_model_len, kv_cache_bytes, dtype, arguments)"
        ) from error
    return llm


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """Variables that vLLM's processes inherit; afterwards ours are as before, without what vLLM added (LD_PRELOAD)."""
    before = dict(os.environ)
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # several engines on one machine would otherwise share its first core
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    try:
        os.environ.update({name: value for name, value in wanted.items() if name not in before})
        os.environ["OMP_NUM_THREADS"] = str(threads)
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
