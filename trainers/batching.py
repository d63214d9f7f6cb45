"""From the items of a batch to micro-batches of padded rows, with one advantage per row.

Goes in: Items of one batch (their sequences in memory), an advantage; comes out: rows, split by whole groups into
updates and packed by tokens into micro-batches. Pure; the order depends on the items alone.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.schemas.parts import Sequence
from headrace.schemas.records import Item
from headrace.trainers.advantages.advantage import Advantage, GroupRewards

__all__ = ("MicroBatch", "Row", "count_rows", "dummy", "pack", "rows_of", "split_updates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to train on: tokens int32, behave log-probs float32 (nats), mask bool, versions int32; all [length].

    group: key of its group within the batch. advantage, reward (raw): of its trajectory. temperature:
    it was sampled at.
    """

    group: tuple[int, int]
    tokens: npt.NDArray[np.int32]
    behave: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    versions: npt.NDArray[np.int32]
    advantage: float
    temperature: float = 1.0
    reward: float = 0.0

    @property
    def trained(self) -> int:
        """Count of trained tokens."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Right-padded rows as tensors: tokens int64, behave float32, mask bool, versions int64, advantages float32
    [rows, length]; temperature, rewards float32 [rows]. ``rows`` are their indices in the update's list of rows.
    """

    rows: Listed[int]
    tokens: Tensor
    behave: Tensor
    mask: Tensor
    versions: Tensor
    advantages: Tensor
    temperature: Tensor
    rewards: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device."""
        if device.type == "cpu":
            return self
        moved = {
            name: getattr(self, name).to(device)
            for name in ("tokens", "behave", "mask", "versions", "advantages", "temperature", "rewards")
        }
        return MicroBatch(rows=self.rows, **moved)


def rows_of(items: Listed[Item], advantage: Advantage) -> list[Row]:
    """Rows of the items in their order; every sequence of a trajectory gets the trajectory's advantage.

    Sequences that are not trainable are left out.
    """
    groups: dict[tuple[int, int], list[Item]] = {}
    for item in items:
        groups.setdefault((item.group, item.use), []).append(item)
    rows = []
    for key, members in groups.items():
        first = members[0]
        values = advantage(
            GroupRewards(
                rewards=[m.shaped_reward for m in members],
                mean=first.group_mean,
                std=first.group_std,
                count=first.group_count,
            )
        )
        for member, value in zip(members, values, strict=True):
            rows += [
                _row(key, sequence, value, member.raw_reward) for sequence in member.sequences if sequence.trainable
            ]
    return rows


def _row(group: tuple[int, int], sequence: Sequence, advantage: float, reward: float) -> Row:
    mask = sequence.mask.astype(bool)
    if mask.size:
        mask[0] = False  # the first token has nothing before it to be predicted from
    return Row(
        group=group,
        tokens=sequence.tokens,
        behave=sequence.logprobs,
        mask=mask,
        versions=sequence.versions,
        advantage=advantage,
        temperature=sequence.sampling.temperature or 1.0,
        reward=reward,
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


def count_rows(rows: Listed[Row]) -> dict[str, float]:
    """Trained tokens, and sequences that have one."""
    trained = [row.trained for row in rows]
    return {"tokens": float(sum(trained)), "sequences": float(sum(1 for n in trained if n))}


def pack(rows: Listed[Row], tokens: int) -> list[MicroBatch]:
    """Micro-batches of at most ``tokens`` padded tokens (one row at least), rows of similar length together."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].tokens), i))
    out: list[MicroBatch] = []
    taken: list[int] = []
    for i in order:
        if taken and (len(taken) + 1) * len(rows[i].tokens) > tokens:
            out.append(_pad(rows, taken))
            taken = []
        taken.append(i)
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
        advantage=0.0,
    )
    return replace(_pad([row], [0]), rows=())


def _pad(rows: Listed[Row], taken: Listed[int]) -> MicroBatch:
    chosen = [rows[i] for i in taken]
    shape = (len(chosen), max(2, *(len(row.tokens) for row in chosen)))
    tokens, behave = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    mask, versions = np.zeros(shape, bool), np.full(shape, -1, np.int64)
    for at, row in enumerate(chosen):
        n = len(row.tokens)
        tokens[at, :n], behave[at, :n] = row.tokens, row.behave
        mask[at, :n], versions[at, :n] = row.mask, row.versions
    advantages = np.array([row.advantage for row in chosen], np.float32)
    return MicroBatch(
        rows=tuple(taken),
        tokens=torch.from_numpy(tokens),
        behave=torch.from_numpy(behave),
        mask=torch.from_numpy(mask),
        versions=torch.from_numpy(versions),
        advantages=torch.from_numpy(np.broadcast_to(advantages[:, None], shape).copy()),
        temperature=torch.from_numpy(np.array([row.temperature for row in chosen], np.float32)),
        rewards=torch.from_numpy(np.array([row.reward for row in chosen], np.float32)),
    )
