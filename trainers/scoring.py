"""From rows of a batch to rows with advantages per token, and returns where there is a critic.

In: a rank's items and rows, the values and KL estimates that the advantage asks for; out: the same rows with
advantages. Statistics that are over the batch are added up over all ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Item
from headrace.trainers.advantages.advantage import AddUp, Advantage, BatchAdvantage, Needs, Scored
from headrace.trainers.batching import MicroBatch, Row, group_values

__all__ = ("by_row", "needs_of", "scored_rows")

Arrays = Sequence[npt.NDArray[np.float32]]


def needs_of(advantage: Advantage | BatchAdvantage) -> Needs:
    """What an advantage looks at beyond rewards."""
    return advantage.needs if isinstance(advantage, BatchAdvantage) else Needs()


def by_row(micros: Sequence[MicroBatch], outputs: Sequence[Tensor], rows: int) -> list[npt.NDArray[np.float32]]:
    """What a forward pass gave for micro-batches, [rows, length] each, as one array per row without its padding."""
    out = [np.zeros(0, np.float32)] * rows
    for micro, output in zip(micros, outputs, strict=True):
        found = output.detach().float().cpu().numpy()
        for at, row in enumerate(micro.rows):
            out[row] = found[at, : int(micro.lengths[at])].copy()
    return out


def scored_rows(
    items: Sequence[Item],
    rows: Sequence[Row],
    advantage: Advantage | BatchAdvantage,
    add_up: AddUp,
    *,
    values: Arrays = (),
    kl: Arrays = (),
) -> list[Row]:
    """Rows with advantages, and with values and returns where ``values`` are given; collective.

    values, kl: one array for each row, as ``Scored`` has them. Raises ConfigurationError when an advantage is not
    finite: rewards are, so it is the plug-in's mistake, and training on it would change nothing or everything.
    """
    if not isinstance(advantage, BatchAdvantage):
        each = group_values(items, advantage)
        out = [replace(r, advantages=np.where(r.mask, np.float32(each[r.item]), np.float32(0))) for r in rows]
        return _checked(out, items, advantage)
    own: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        own.setdefault(row.item, []).append(at)
    members = [_scored(items[item], rows, indices, values, kl) for item, indices in own.items()]
    out = list(rows)
    for indices, found in zip(own.values(), advantage.of_batch(members, add_up), strict=True):
        for number, at in enumerate(indices):
            out[at] = replace(rows[at], advantages=found.advantages[number].astype(np.float32))
            if found.returns:
                returns = found.returns[number].astype(np.float32)
                out[at] = replace(out[at], values=values[at], returns=returns)
    return _checked(out, items, advantage)


def _checked(rows: list[Row], items: Sequence[Item], advantage: object) -> list[Row]:
    for row in rows:
        if (bad := row.advantages[~np.isfinite(row.advantages)]).size:
            item = items[row.item]
            raise ConfigurationError(
                f"advantage {type(advantage).__name__} gave {bad[0]} for group "
                f"{item.group}, replica {item.replica} (reward {item.shaped_reward:g}, mean {item.group_mean:g}, "
                f"deviation {item.group_std:g}, {item.group_count} counted); mend it or take another"
            )
    return rows


def _scored(item: Item, rows: Sequence[Row], indices: Sequence[int], values: Arrays, kl: Arrays) -> Scored:
    trained = [sequence for sequence in item.sequences if sequence.trainable]
    return Scored(
        group=(item.group, item.use),
        reward=item.shaped_reward,
        mean=item.group_mean,
        std=item.group_std,
        count=item.group_count,
        masks=[rows[at].mask for at in indices],
        roles=[sequence.role for sequence in trained],
        turn_rewards=_by_turn(item),
        values=[values[at] for at in indices] if values else (),
        kl=[kl[at] for at in indices] if kl else (),
    )


def _by_turn(item: Item) -> dict[int, float]:
    """The parts of the reward that belong to a turn, added up."""
    out: dict[int, float] = {}
    for part in item.rewards:
        if part.turn >= 0:
            out[part.turn] = out.get(part.turn, 0.0) + part.value
    return out
