"""What is normalised together: the trajectories of a group, or those of one role where a policy is rewarded in several.

Goes in: Items of a batch; comes out: shares, each with the reward and the statistics that its advantage is made from.
Most items are one share; an item of a group with statistics by role is one for each role that it was rewarded for, so
that a solver's second attempt is compared with second attempts and a judge with judges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.schemas.records import Item
from headrace.schemas.role_rewards import role_rewards
from headrace.trainers.advantages.advantage import Advantage, GroupRewards

__all__ = ("Share", "group_values", "share_of", "shares_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of an item that gets one advantage.

    item: its index. role: empty for a whole item. group: key within the batch, of two or three parts. reward: shaped;
    mean, std, count: of what it is compared with. length: trained tokens. parts: named parts of the reward; turns:
    those that belong to a turn, added up.
    """

    item: int
    role: str
    group: tuple[int, int] | tuple[int, int, str]
    reward: float
    mean: float
    std: float
    count: int
    length: int
    parts: dict[str, float]
    turns: dict[int, float]


def share_of(item: Item, role: str) -> str:
    """The share that a sequence in this role belongs to: the role's own, or the whole item's (empty)."""
    apart = any(known.role == role for known in item.group_roles)
    return role if apart and any(part.role == role and part.turn < 0 for part in item.rewards) else ""


def shares_of(items: Sequence[Item]) -> list[Share]:
    """The shares of items in their order; sequences that are not trainable make none."""
    out = []
    for at, item in enumerate(items):
        roles = [share_of(item, s.role) for s in item.sequences if s.trainable]
        out += [_share(at, item, role) for role in dict.fromkeys(roles)]
    return out


def _share(at: int, item: Item, role: str) -> Share:
    own = [part for part in item.rewards if not role or part.role in ("", role)]
    turns: dict[int, float] = {}
    for part in own:
        if part.turn >= 0:
            turns[part.turn] = turns.get(part.turn, 0.0) + part.value
    parts = {part.name: part.value for part in own if part.turn < 0}
    if not role:
        return Share(
            item=at, role="", group=(item.group, item.use), reward=item.shaped_reward, mean=item.group_mean,
            std=item.group_std, count=item.group_count, length=item.length, parts=parts, turns=turns,
        )  # fmt: skip
    earned = role_rewards(item.rewards, raw=item.raw_reward, shaped=item.shaped_reward)
    known = next(statistics for statistics in item.group_roles if statistics.role == role)
    length = sum(int(s.mask.sum()) for s in item.sequences if s.role == role)
    return Share(
        item=at, role=role, group=(item.group, item.use, role), reward=earned[role], mean=known.mean, std=known.std,
        count=known.count, length=length, parts=parts, turns=turns,
    )  # fmt: skip


def group_values(items: Sequence[Item], advantage: Advantage) -> dict[tuple[int, str], float]:
    """The advantage of every share, by item and role, from what it is compared with."""
    groups: dict[tuple[int, int] | tuple[int, int, str], list[Share]] = {}
    for share in shares_of(items):
        groups.setdefault(share.group, []).append(share)
    out: dict[tuple[int, str], float] = {}
    for shares in groups.values():
        first = shares[0]
        given = GroupRewards(
            rewards=[s.reward for s in shares],
            mean=first.mean,
            std=first.std,
            count=first.count,
            lengths=[s.length for s in shares],
            parts=[s.parts for s in shares],
        )
        for share, value in zip(shares, advantage(given), strict=True):
            out[share.item, share.role] = value
    return out
