"""Hands published weights to vLLM: files of changed values in checkpoint coordinates, and the calls that install them.

Goes in: whole weights of a version on the host; comes out: an engine that serves exactly them, with nothing cached of
the version before. vLLM's own loader maps names to fused and sliced parameters, so this knows no architecture. An
update that fails half-way is answered by a whole one, because vLLM does not roll back. vLLM is imported only
around its own start.
"""

import fcntl
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.connectors.checkpoint_file import write_safetensors
from headrace.connectors.engines.engine import WeightsRefused
from headrace.schemas.delta_steps import changed_positions

__all__ = (
    "BACKEND",
    "WORKER_EXTENSION",
    "HandOver",
    "cache_salt",
    "engine_arguments",
    "install",
    "install_async",
    "starting",
)

BACKEND = "headrace"
WORKER_EXTENSION = "headrace.connectors.engines.vllm_worker.WeightWorker"
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "headrace-weights-"
_FRESH_SECONDS = 60.0
"""A folder this young may not be locked by its owner yet."""

Weights = Mapping[str, NDArray[Any]]


class _OwnModules:
    """``sys`` as vLLM's search for kernels may see it."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "vllm"}


@contextmanager
def starting() -> Iterator[None]:
    """Around the start of an engine in this process.

    On CPU vLLM looks for holders of its kernels in every loaded module, and stumbles over objects that answer to any
    attribute (llvmlite's) or to none before their time (werkzeug's proxies). Only vLLM's modules hold such kernels, so
    meanwhile the search sees no others.
    """
    try:
        dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
    except ImportError:
        yield
        return
    dispatcher.sys = _OwnModules()
    try:
        # registers itself only where vLLM is there first, which a process that looked at it earlier had not
        importlib.import_module(WORKER_EXTENSION.rpartition(".")[0]).register()
        yield
    finally:
        dispatcher.sys = sys


def engine_arguments() -> dict[str, Any]:
    """Arguments for ``LLM`` or ``AsyncEngineArgs`` with which an engine takes weights from here.

    ``load_format`` is dummy: the first ``install`` brings every weight.
    """
    return {
        "load_format": "dummy",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
    }


def cache_salt(version: int) -> str:
    """What prompts carry (``cache_salt``) so that the prefix cache never gives keys of older weights to new requests.

    Needed where running requests keep their key-value cache: vLLM then cannot reset its prefix cache.
    """
    return f"v{version}"


class HandOver:
    """Writes the updates of one engine, and knows which weights the engine has.

    folder: where files lie for the time of an update, readable by the engine's workers (None: shared memory where there
    is some, else the temporary folder). verify: workers read back what they have loaded and compare digests: ``never``,
    ``first`` (with whole updates) or ``always``.
    """

    def __init__(self, folder: Path | None = None, *, verify: str = "first") -> None:
        parent = folder if folder is not None else _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        _sweep(parent or Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._owned = os.open(self._folder, os.O_RDONLY)
        fcntl.flock(self._owned, fcntl.LOCK_EX)
        self._verify = verify
        self._held: Weights | None = None
        self.version = -1
        """The version that the engine has; -1 when nobody knows."""

    def prepare(self, weights: Weights, version: int) -> dict[str, Any]:
        """Write the update to a version and return what ``update_weights`` takes.

        weights: name -> raw bits (uint16 for bfloat16) or values; they must stay unchanged until another version is
        installed. Raises WeightsRefused for NaN, which vLLM's updates cannot carry, and for another set of tensors.
        """
        held = self._held
        if held is not None and {n: a.shape for n, a in held.items()} != {n: a.shape for n, a in weights.items()}:
            raise WeightsRefused(f"weights of version {version} have other tensors than version {self.version}")
        verify = self._verify == "always" or (self._verify == "first" and held is None)
        tensors: dict[str, NDArray[Any]] = {}
        digests: dict[str, str] = {}
        for name, array in weights.items():
            flat = np.ascontiguousarray(array).reshape(-1)
            if held is None:
                values = flat
            else:
                where = changed_positions(np.ascontiguousarray(held[name]).reshape(-1).view(flat.dtype), flat)
                if not where.size:
                    continue
                tensors[f"{name}#at"] = where.astype(np.int32 if flat.size < 1 << 31 else np.int64)
                values = flat[where]
            if _has_nan(values):
                raise WeightsRefused(f"{name} of version {version} has NaN; vLLM keeps version {self.version}")
            tensors[f"{name}#new"] = values
            if verify:
                digests[name] = xxhash.xxh3_128_hexdigest(flat.view(np.uint8).data)
        path = self._folder / f"{version}-{'whole' if held is None else 'changed'}.safetensors"
        # Wide elements first: every tensor is then aligned, and workers map the file without a copy.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        write_safetensors(path, tensors, {name: _dtype_of(array) for name, array in tensors.items()}, {})
        return {
            "path": str(path),
            "version": version,
            "shapes": {name: list(array.shape) for name, array in weights.items()},
            "dtypes": {name: _dtype_of(array) for name, array in weights.items()},
            "digests": digests,
        }

    def installed(self, weights: Weights, version: int) -> None:
        """Note that the engine has a version; its files go."""
        self._held, self.version = weights, version
        self._clear()

    @property
    def held(self) -> Weights:
        """The weights that the engine has; empty when nobody knows."""
        return self._held if self._held is not None else {}

    def lost(self) -> None:
        """Note that nobody knows what the engine has: the next update is whole."""
        self._held, self.version = None, -1
        self._clear()

    def close(self) -> None:
        """Remove the folder."""
        if self._owned >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._owned)
            self._owned = -1

    def _clear(self) -> None:
        for path in self._folder.iterdir():
            with suppress(OSError):
                path.unlink()


def install(engine: Any, hand_over: HandOver, weights: Weights, version: int, *, recompute: bool = True) -> None:
    """Put a version in force in a vLLM ``LLM`` between two of its steps, whole or not at all.

    recompute: running requests compute their key-value cache anew; without it they keep it, and prompts need
    ``cache_salt``. Raises WeightsRefused, after which the engine must not sample until an ``install`` succeeds, unless
    the weights were refused before anything was sent.
    """
    work = _install(_Blocking(engine, recompute), hand_over, weights, version)
    with suppress(StopIteration):  # nothing in it waits, so one step is all of it
        work.send(None)


async def install_async(
    engine: Any, hand_over: HandOver, weights: Weights, version: int, *, recompute: bool = True, resume: bool = True
) -> None:
    """The same for an ``AsyncLLM``, which is paused meanwhile; its completions then name ``version`` (text).

    resume: without it the engine stays paused, as whoever paused it before wants.
    When it raises WeightsRefused after a failed update the engine stays paused: its weights are those of no version.
    """
    await _install(_Paused(engine, recompute, resume), hand_over, weights, version)


class _Calls(Protocol):
    """How an engine is told."""

    async def begin(self, *, first: bool) -> None: ...

    async def update(self, info: dict[str, Any], version: int) -> None: ...

    async def end(self, *, changed: bool) -> None: ...


async def _install(calls: _Calls, hand_over: HandOver, weights: Weights, version: int) -> None:
    """Update by changes; when that fails, by everything."""
    await calls.begin(first=hand_over.version < 0)
    for last in (False, True):
        try:
            info = hand_over.prepare(weights, version)
        except WeightsRefused:
            if not last:  # nothing was sent: the version before is whole
                await calls.end(changed=False)
            raise
        taken = False
        try:
            await calls.update(info, version)
            taken = True
            break
        except Exception as error:  # a worker's errors come in whatever form vLLM gives them
            if last:
                raise WeightsRefused(f"vLLM did not take version {version}, changed or whole: {error}") from error
        finally:
            if not taken:  # also when it was cancelled: the workers may have taken a part of it
                hand_over.lost()
    hand_over.installed(weights, version)
    await calls.end(changed=True)


class _Blocking:
    """An ``LLM``, which runs only when it is called."""

    def __init__(self, engine: Any, recompute: bool) -> None:
        self._engine, self._recompute = engine, recompute

    async def begin(self, *, first: bool) -> None:
        if first:
            self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})

    async def update(self, info: dict[str, Any], version: int) -> None:
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", kwargs={"update_info": info})
        self._engine.collective_rpc("finish_weight_update")

    async def end(self, *, changed: bool) -> None:
        if changed:
            self._engine.reset_prefix_cache(reset_running_requests=self._recompute)


class _Paused:
    """An ``AsyncLLM``, held for the time of the update."""

    def __init__(self, engine: Any, recompute: bool, resume: bool) -> None:
        self._engine, self._recompute, self._resume = engine, recompute, resume

    async def begin(self, *, first: bool) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.pause_generation(mode="keep", clear_cache=self._recompute)
        if first:
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    async def update(self, info: dict[str, Any], version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.start_weight_update()
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._engine.finish_weight_update(weight_version=str(version))

    async def end(self, *, changed: bool) -> None:
        if self._resume:
            await self._engine.resume_generation()


def _sweep(parent: Path) -> None:
    """Remove the folders of owners that were killed, which would fill shared memory; a living owner locks its own."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _FRESH_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _has_nan(values: NDArray[Any]) -> bool:
    if values.dtype == np.uint16:
        return bool(((values & np.uint16(0x7FFF)) > 0x7F80).any())
    return bool(np.isnan(values).any()) if values.dtype.kind == "f" else False


def _dtype_of(array: NDArray[Any]) -> str:
    """Torch's name of an array's dtype; uint16 holds the bits of bfloat16."""
    return "bfloat16" if array.dtype == np.uint16 else array.dtype.name
