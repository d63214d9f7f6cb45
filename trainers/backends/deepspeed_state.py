"""What a rank of a DeepSpeed engine holds of masters and optimizer states, to be copied out and put back.

Goes in: an engine's parameters by name; comes out: runs of elements (``state_file``), whatever the ZeRO stage and the
count of ranks. Where DeepSpeed replicates, ranks share the writing; where it cuts, each writes its own runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.trainers.backends.state_file import MASTER, SavedState, StatePart, owners
from headrace.trainers.ranks import Ranks

__all__ = ("copy_state", "put_state_back")

Named = Sequence[tuple[str, Any]]
"""Trained parameters by published name."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements of a parameter that this rank holds, as they are: views, except where DeepSpeed swaps them."""

    name: str
    start: int
    live: Mapping[str, Tensor]
    writes: bool


def copy_state(engine: Any, named: Named, masters: Sequence[Tensor], ranks: Ranks) -> StatePart:
    """Copy this rank's part to the host. masters: fp32 weights that the backend keeps itself, by parameter; or none."""
    part = StatePart(ranks.rank, ranks.size, step=_step(engine))
    for run in _runs(engine, named, masters, ranks):
        if run.writes:
            for kind, values in run.live.items():
                part.add(kind, run.name, run.start, values)
    return part


def put_state_back(engine: Any, named: Named, masters: Sequence[Tensor], ranks: Ranks, saved: SavedState) -> None:
    """Make the engine go on from a saved state: masters, optimizer states, and the weights that forward computes with.

    Raises ConfigurationError when it is of another model.
    """
    saved.check_names({name: _elements(p) for name, p in named})
    if saved.kinds:
        _make_room(engine, saved)
    with torch.no_grad():
        for run in _runs(engine, named, masters, ranks):
            for kind, live in run.live.items():
                values = saved.read(kind, run.name, run.start, live.numel())
                live.view(-1).copy_(values)
        for name, p in named:
            _refresh(p, saved, name, engine, ranks)


def _elements(p: Any) -> int:
    return int(getattr(p, "ds_numel", p.numel()))


def _base(engine: Any) -> Any:
    """torch's optimizer, below DeepSpeed's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _flats(engine: Any) -> list[Tensor]:
    """The fp32 tensors that the optimizer updates."""
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    groups = getattr(optimizer, "fp32_groups", None) or [group["params"] for group in optimizer.param_groups]
    return [p for group in groups for p in group]


def _step(engine: Any) -> float:
    return max((float(state["step"]) for state in _base(engine).state.values() if "step" in state), default=0.0)


def _make_room(engine: Any, saved: SavedState) -> None:
    """Optimizer states as after ``saved.step`` updates: they come into being with the first one."""
    base = _base(engine)
    whole_step = not isinstance(base, torch.optim.Adam)
    for flat in _flats(engine):
        state = base.state[flat]
        state["step"] = int(saved.step) if whole_step else torch.tensor(saved.step)
        for kind in saved.kinds:
            if kind not in state:
                state[kind] = torch.zeros_like(flat, requires_grad=False)
    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:
        link()


def _runs(engine: Any, named: Named, masters: Sequence[Tensor], ranks: Ranks) -> Iterator[_Run]:
    first = named[0][1]
    if hasattr(first, "ds_id"):
        yield from _runs_of_stage_3(engine, named)
    elif hasattr(first, "_hp_mapping"):
        yield from _runs_of_stage_1_and_2(named)
    else:
        yield from _replicated(engine, named, masters, ranks)


def _runs_of_stage_3(engine: Any, named: Named) -> Iterator[_Run]:
    optimizer, state = engine.optimizer, _base(engine).state
    for name, p in named:
        group, at, count = optimizer.grad_position[optimizer.get_param_id(p)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        start = optimizer._get_param_partition_rank(p) * count
        count = max(0, min(count, _elements(p) - start))
        live = {MASTER: flat.narrow(0, at, count)}
        live |= {kind: values.narrow(0, at, count) for kind, values in _moments(state.get(flat, {}), flat)}
        if count:
            yield _Run(name, start, live, writes=True)


def _runs_of_stage_1_and_2(named: Named) -> Iterator[_Run]:
    for name, p in named:
        mapping = p._hp_mapping
        if mapping is not None:
            live = {MASTER: mapping.hp_fragment, **(mapping.optim_fragment or {})}
            yield _Run(name, mapping.lp_fragment_address.start, live, writes=True)


def _replicated(engine: Any, named: Named, masters: Sequence[Tensor], ranks: Ranks) -> Iterator[_Run]:
    state = _base(engine).state
    flats = _flats(engine)
    held = list(masters) or flats
    writers = owners([_elements(p) for _, p in named], ranks.size)
    for (name, _), flat, master, writer in zip(named, flats, held, writers, strict=True):
        live = {MASTER: master.detach(), **dict(_moments(state.get(flat, {}), flat))}
        yield _Run(name, 0, live, writes=writer == ranks.rank)


def _moments(state: Mapping[str, Any], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    for kind, values in state.items():
        if torch.is_tensor(values) and values.shape == flat.shape and values.dim():
            yield kind, values


def _refresh(p: Any, saved: SavedState, name: str, engine: Any, ranks: Ranks) -> None:
    """The weights of the forward pass from the saved masters."""
    shard = getattr(p, "ds_tensor", None)
    if shard is not None:
        start = engine.optimizer._get_param_partition_rank(p) * shard.numel()
        count = max(0, min(shard.numel(), _elements(p) - start))
        shard.data[:count].copy_(saved.read(MASTER, name, start, count))
    if p.numel():
        p.data.copy_(saved.read(MASTER, name, 0, p.numel()).view(p.shape))
