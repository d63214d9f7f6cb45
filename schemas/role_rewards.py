"""What a member earned in each role, where the policy plays several roles that are rewarded apart.

Goes in: the reward of a member or an item with its named parts; comes out: a shaped reward by role. A role earns its
own parts, those of the whole trajectory, and what shaping added to or took from the member.
"""

from collections.abc import Sequence

from headrace.schemas.parts import Reward

__all__ = ("role_rewards", "split_reward")


def split_reward(rewards: Sequence[Reward]) -> tuple[float, dict[str, float]]:
    """The sum of the parts of the whole trajectory, and the sum of those of each role.

    Parts that belong to a turn count in neither.

    >>> split_reward([Reward(name="a", value=1.0), Reward(name="b", value=0.5, role="judge")])
    (1.0, {'judge': 0.5})
    """
    whole, roles = 0.0, dict[str, float]()
    for part in rewards:
        if part.turn >= 0:
            continue
        if part.role:
            roles[part.role] = roles.get(part.role, 0.0) + part.value
        else:
            whole += part.value
    return whole, roles


def role_rewards(rewards: Sequence[Reward], *, raw: float, shaped: float) -> dict[str, float]:
    """Shaped reward of every role that has parts of its own.

    >>> parts = [Reward(name="a", value=1.0, role="solver"), Reward(name="a", value=0.0, role="retry")]
    >>> role_rewards(parts, raw=0.5, shaped=0.25)
    {'solver': 0.75, 'retry': -0.25}
    """
    whole, roles = split_reward(rewards)
    return {role: whole + value + (shaped - raw) for role, value in roles.items()}
