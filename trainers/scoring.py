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
from headrace.trainers.batching import MicroBatch, Row
from headrace.trainers.shares import Share, group_values, share_of, shares_of

__all__ = ("by_row", "needs_of", "scored_rows")

Arrays = Sequence[npt.NDArray[np.float32]]


def needs_of(advantage: Advantage | BatchAdvantage) -> Needs:
    """What an advantage looks at beyond rewards."""
    return advantage.needs if isinstance(advantage, BatchAdvantage) else Needs()


def by_row(
    micros: Sequence[MicroBatch], outputs: Sequence[Tensor], rows: Sequence[Row]
) -> list[npt.NDArray[np.float32]]:
    """What a forward pass gave for micro-batches, [rows, length] each, as one array per row without its padding.

    0 for rows that are in none of them.
    """
    out = [np.zeros(len(row.tokens), np.float32) for row in rows]
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
    keys = [(row.item, share_of(items[row.item], row.role)) for row in rows]
    if not isinstance(advantage, BatchAdvantage):
        each = group_values(items, advantage)
        out = [
            replace(r, advantages=np.where(r.mask, np.float32(each[key]), np.float32(0)))
            for r, key in zip(rows, keys, strict=True)
        ]
        return _checked(out, items, advantage)
    own: dict[tuple[int, str], list[int]] = {}
    for at, key in enumerate(keys):
        own.setdefault(key, []).append(at)
    shares = {(share.item, share.role): share for share in shares_of(items)}
    members = [_scored(shares[key], rows, indices, values, kl) for key, indices in own.items()]
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


def _scored(share: Share, rows: Sequence[Row], indices: Sequence[int], values: Arrays, kl: Arrays) -> Scored:
    return Scored(
        group=share.group,
        reward=share.reward,
        mean=share.mean,
        std=share.std,
        count=share.count,
        masks=[rows[at].mask for at in indices],
        roles=[rows[at].role for at in indices],
        turn_rewards=share.turns,
        values=[values[at] for at in indices] if values else (),
        kl=[kl[at] for at in indices] if kl else (),
    )
