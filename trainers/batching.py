"""From the items of a batch to micro-batches of padded rows, with advantages per token.

Goes in: Items of one batch (their sequences in memory), an advantage; comes out: rows, split by whole groups into
updates and packed by tokens into micro-batches. Pure; the order depends on the items alone.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.schemas.parts import Sequence
from headrace.schemas.records import Item
from headrace.trainers.advantages.advantage import Advantage
from headrace.trainers.shares import group_values, share_of

__all__ = ("MicroBatch", "Row", "bare_rows", "count_rows", "dummy", "pack", "rows_of", "split_updates")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to train on: tokens int32, behave log-probs float32 (nats), mask bool, versions int32, advantages
    float32; with a critic also values (before the batch) and returns float32; all [length].

    item: index of its trajectory among the rank's items. role: what the policy played. group: key of its group within
    the batch. reward (raw): of its trajectory. temperature: it was sampled at. unit_tokens: trained tokens of what
    counts as one sequence in aggregation, the trajectory or this row.
    """

    item: int = 0
    role: str = ""
    group: tuple[int, int]
    tokens: npt.NDArray[np.int32]
    behave: Floats
    mask: npt.NDArray[np.bool_]
    versions: npt.NDArray[np.int32]
    advantages: Floats
    temperature: float = 1.0
    reward: float = 0.0
    unit_tokens: int = 0
    values: Floats | None = None
    returns: Floats | None = None

    @property
    def trained(self) -> int:
        """Count of trained tokens."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Right-padded rows as tensors: tokens int64, behave float32, mask bool, versions int64, advantages float32
    [rows, length], and values and returns float32 where there is a critic; temperature, rewards, unit_tokens float32,
    lengths int64 [rows]. ``rows`` are their indices in the update's list of rows.
    """

    rows: Listed[int]
    tokens: Tensor
    behave: Tensor
    mask: Tensor
    versions: Tensor
    advantages: Tensor
    temperature: Tensor
    rewards: Tensor
    lengths: Tensor
    unit_tokens: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device."""
        if device.type == "cpu":
            return self
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in held.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def bare_rows(items: Listed[Item], *, by_trajectory: bool = True) -> list[Row]:
    """Rows of the items without advantages, group by group in the order of the items.

    Sequences that are not trainable are left out. by_trajectory: a trajectory counts once in aggregation, however many
    sequences it has; else every sequence counts.
    """
    rows = []
    for key, members in _groups(items).items():
        for at in members:
            own = [_row(key, at, sequence, items[at]) for sequence in items[at].sequences if sequence.trainable]
            whole = sum(row.trained for row in own)
            rows += [replace(row, unit_tokens=whole if by_trajectory else row.trained) for row in own]
    return rows


def rows_of(items: Listed[Item], advantage: Advantage, *, by_trajectory: bool = True) -> list[Row]:
    """Rows of the items; every token of a trajectory, or of a role of it, gets the same advantage (``shares``)."""
    values = group_values(items, advantage)
    out = []
    for row in bare_rows(items, by_trajectory=by_trajectory):
        value = np.float32(values[row.item, share_of(items[row.item], row.role)])
        out.append(replace(row, advantages=np.where(row.mask, value, np.float32(0))))
    return out


def _groups(items: Listed[Item]) -> dict[tuple[int, int], list[int]]:
    """Indices of the members of each group."""
    groups: dict[tuple[int, int], list[int]] = {}
    for at, item in enumerate(items):
        groups.setdefault((item.group, item.use), []).append(at)
    return groups


def _row(group: tuple[int, int], at: int, sequence: Sequence, item: Item) -> Row:
    mask = sequence.mask.astype(bool)
    if mask.size:
        mask[0] = False  # the first token has nothing before it to be predicted from
    return Row(
        item=at,
        role=sequence.role,
        group=group,
        tokens=sequence.tokens,
        behave=sequence.logprobs,
        mask=mask,
        versions=sequence.versions,
        advantages=np.zeros(len(mask), np.float32),
        temperature=sequence.sampling.temperature or 1.0,
        reward=item.raw_reward,
    )


def split_updates(rows: Listed[Row], updates: int, groups: Iterable[tuple[int, int]]) -> list[list[Row]]:
    """``updates`` parts of about the same count of groups, whole groups each; parts may be empty.

    groups: keys of all groups of the batch, on whatever rank they are, so that every rank splits alike.
    """
    if updates == 1:
        return [list(rows)]
    order = sorted(set(groups))
    part_of = {group: at * updates // len(order) for at, group in enumerate(order)}
    parts: list[list[Row]] = [[] for _ in range(updates)]
    for row in rows:
        parts[part_of[row.group]].append(row)
    return parts


def count_rows(rows: Listed[Row], *, by_trajectory: bool = True) -> dict[str, float]:
    """Trained tokens, sequences that have one, and units of aggregation that have one."""
    trained = [row.trained for row in rows]
    sequences = float(sum(1 for n in trained if n))
    units = len({row.item for row, n in zip(rows, trained, strict=True) if n}) if by_trajectory else sequences
    return {"tokens": float(sum(trained)), "sequences": sequences, "units": float(units)}


def pack(rows: Listed[Row], tokens: int) -> list[MicroBatch]:
    """Micro-batches of at most ``tokens`` tokens (one row at least), rows of similar length together.

    Rows without a trained token are in none: there is nothing to compute for them, and they may be empty.
    """
    order = sorted((i for i, row in enumerate(rows) if row.trained), key=lambda i: (len(rows[i].tokens), i))
    out: list[MicroBatch] = []
    taken: list[int] = []
    held = 0
    for i in order:
        if taken and held + len(rows[i].tokens) > tokens:
            out.append(_pad(rows, taken))
            taken, held = [], 0
        taken.append(i)
        held += len(rows[i].tokens)
    if taken:
        out.append(_pad(rows, taken))
    return out


def dummy() -> MicroBatch:
    """A micro-batch that trains nothing: ranks with fewer micro-batches run it, so that collectives meet."""
    row = Row(
        group=(-1, 0),
        tokens=np.zeros(2, np.int32),
        behave=np.zeros(2, np.float32),
        mask=np.zeros(2, bool),
        versions=np.full(2, -1, np.int32),
        advantages=np.zeros(2, np.float32),
        values=np.zeros(2, np.float32),
        returns=np.zeros(2, np.float32),
    )
    return replace(_pad([row], [0]), rows=())


def _pad(rows: Listed[Row], taken: Listed[int]) -> MicroBatch:
    chosen = [rows[i] for i in taken]
    length = max(2, *(len(row.tokens) for row in chosen))

    def padded(arrays: Listed[npt.NDArray[Any]], dtype: type, empty: int = 0) -> Tensor:
        out: npt.NDArray[Any] = np.full((len(chosen), length), empty, dtype)
        for at, array in enumerate(arrays):
            out[at, : len(array)] = array
        return torch.from_numpy(out)

    values, returns = ([x for row in chosen if (x := getattr(row, k)) is not None] for k in ("values", "returns"))
    return MicroBatch(
        rows=tuple(taken),
        tokens=padded([row.tokens for row in chosen], np.int64),
        behave=padded([row.behave for row in chosen], np.float32),
        mask=padded([row.mask for row in chosen], np.bool_),
        versions=padded([row.versions for row in chosen], np.int64, -1),
        advantages=padded([row.advantages for row in chosen], np.float32),
        temperature=torch.from_numpy(np.array([row.temperature for row in chosen], np.float32)),
        rewards=torch.from_numpy(np.array([row.reward for row in chosen], np.float32)),
        lengths=torch.from_numpy(np.array([len(row.tokens) for row in chosen], np.int64)),
        unit_tokens=torch.from_numpy(np.array([max(1, row.unit_tokens) for row in chosen], np.float32)),
        values=padded(values, np.float32) if values else None,
        returns=padded(returns, np.float32) if returns else None,
    )
