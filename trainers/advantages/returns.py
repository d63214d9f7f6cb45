"""Advantages per token from what is still to come: rewards placed on tokens, returns or GAE, whitened over the batch.

The sequences of a trajectory follow one another, those of one role apart from those of another; observations are
skipped. REINFORCE++ and GAE are this class under other options.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from headrace.trainers.advantages.advantage import AddUp, AdvantageOptions, Floats, Needs, Scored, TokenAdvantages
from headrace.trainers.advantages.tokens import discounted, whitened
from headrace.trainers.losses.kl import KLEstimator

__all__ = ("Returns", "ReturnsOptions")


class ReturnsOptions(AdvantageOptions):
    """reward: what a trajectory's last token is given: its shaped reward, that less the group's mean, or that divided
    by the group's deviation (plus reward_epsilon). turn_rewards: parts of the reward that belong to a turn go to
    the last token of that turn, a turn being an unbroken run of trained tokens. gamma: discount per trained token.

    kl_weight, kl: every token pays this times the estimated KL of behave to the reference. whiten: to mean 0 and
    deviation 1 (plus epsilon) over all trained tokens of the batch.
    """

    reward: Literal["shaped", "centered", "normalized"] = "shaped"
    reward_epsilon: float = Field(1e-6, ge=0)
    turn_rewards: bool = False
    gamma: float = Field(1.0, ge=0, le=1)
    kl_weight: float = Field(0.0, ge=0)
    kl: KLEstimator = "k1"
    whiten: bool = True
    epsilon: float = Field(1e-8, ge=0)


class Returns:
    """See ``BatchAdvantage``."""

    Options: ClassVar[type[AdvantageOptions]] = ReturnsOptions

    def __init__(self, options: ReturnsOptions) -> None:
        self.returning = options

    @property
    def needs(self) -> Needs:
        """The KL to a reference where tokens pay for it."""
        return Needs(kl=self.returning.kl if self.returning.kl_weight else None)

    def chain(self, rewards: Floats, values: Floats) -> tuple[Floats, Floats]:
        """Advantages and returns of the trained tokens of one role in order."""
        returns = discounted(rewards, self.returning.gamma)
        return returns, returns

    def of_batch(self, members: Sequence[Scored], add_up: AddUp) -> list[TokenAdvantages]:
        """See ``BatchAdvantage``."""
        found = [self._member(m) for m in members]
        flat = [advantages for advantages, _ in found]
        if self.returning.whiten:
            flat = whitened(flat, add_up, self.returning.epsilon)
        return [
            TokenAdvantages(
                advantages=_placed(advantages, member),
                returns=_placed(returns, member) if self.needs.values else (),
            )
            for member, advantages, (_, returns) in zip(members, flat, found, strict=True)
        ]

    def _member(self, member: Scored) -> tuple[Floats, Floats]:
        """Advantages and returns of all trained tokens, one sequence after the other."""
        role_of = np.concatenate(
            [np.full(int(m.sum()), at) for m, at in zip(member.masks, _numbered(member.roles), strict=True)]
            or [np.zeros(0, int)]
        )
        values = _trained(member.values, member) if self.needs.values else np.zeros(len(role_of))
        advantages, returns = np.zeros(len(role_of)), np.zeros(len(role_of))
        rewards = self._rewards(member, role_of)
        for role in np.unique(role_of):
            here = role_of == role
            advantages[here], returns[here] = self.chain(rewards[here], values[here])
        return advantages, returns

    def _rewards(self, member: Scored, role_of: npt.NDArray[np.integer]) -> Floats:
        """The reward of each trained token."""
        o = self.returning
        out = np.zeros(len(role_of))
        left = self._outcome(member)
        if o.turn_rewards and o.reward == "shaped":
            ends = _turn_ends(member)
            for turn, value in member.turn_rewards.items():
                if turn < len(ends):
                    out[ends[turn]] += value
                    left -= value
        for role in np.unique(role_of):
            out[np.flatnonzero(role_of == role)[-1]] += left
        if o.kl_weight:
            out -= o.kl_weight * _trained(member.kl, member)
        return out

    def _outcome(self, member: Scored) -> float:
        """The reward of the whole trajectory."""
        o = self.returning
        if o.reward == "shaped":
            return member.reward
        if member.count <= 1:
            return member.reward if o.singleton == "raw" else 0.0
        away = member.reward - member.mean
        if o.reward == "centered":
            return away
        return away / (member.std + o.reward_epsilon) if member.std > 0 else 0.0


def _numbered(roles: Sequence[str]) -> list[int]:
    order = list(dict.fromkeys(roles))
    return [order.index(role) for role in roles]


def _trained(arrays: Sequence[npt.NDArray[np.floating]], member: Scored) -> Floats:
    """The elements on trained tokens, one sequence after the other."""
    parts = [np.asarray(a, np.float64)[mask] for a, mask in zip(arrays, member.masks, strict=True)]
    return np.concatenate([*parts, np.zeros(0)])


def _placed(flat: Floats, member: Scored) -> list[Floats]:
    """The opposite of ``_trained``: per sequence, 0 outside the mask."""
    out, at = [], 0
    for mask in member.masks:
        whole = np.zeros(len(mask))
        whole[mask] = flat[at : at + int(mask.sum())]
        out.append(whole)
        at += int(mask.sum())
    return out


def _turn_ends(member: Scored) -> list[int]:
    """The last trained token of each unbroken run, counted over all trained tokens."""
    ends, at = [], 0
    for mask in member.masks:
        for position in np.flatnonzero(mask):
            if position + 1 == len(mask) or not mask[position + 1]:
                ends.append(at)
            at += 1
    return ends
