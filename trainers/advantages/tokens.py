"""Arithmetic on the trained tokens of a trajectory: discounted returns, GAE, whitening over a batch.

Arrays hold trained tokens only, in order: observations between turns are left out before, so a token's successor is the
next token that the policy itself chose.
"""

from collections.abc import Sequence

import numpy as np

from headrace.trainers.advantages.advantage import AddUp, Floats

__all__ = ("discounted", "generalized", "whitened")


def discounted(rewards: Floats, gamma: float) -> Floats:
    """``G_t = r_t + gamma G_(t+1)``, [tokens]."""
    out, later = np.zeros_like(rewards), 0.0
    for at in range(len(rewards) - 1, -1, -1):
        later = rewards[at] + gamma * later
        out[at] = later
    return out


def generalized(rewards: Floats, values: Floats, gamma: float, lam: float) -> Floats:
    """Generalized advantage estimation (Schulman et al. 2015), [tokens]; the value after the last token is 0.

    ``A_t = d_t + gamma lam A_(t+1)`` with ``d_t = r_t + gamma V_(t+1) - V_t``.
    """
    after = np.append(values[1:], 0.0) if len(values) else values
    return discounted(rewards + gamma * after - values, gamma * lam)


def whitened(arrays: Sequence[Floats], add_up: AddUp, epsilon: float) -> list[Floats]:
    """Arrays with mean 0 and unbiased deviation 1 over all elements on all ranks; collective.

    0 everywhere when all elements are equal or there is only one.
    """
    total = add_up({"n": float(sum(a.size for a in arrays)), "x": float(sum(a.sum() for a in arrays))})
    n = total.get("n", 0.0)
    mean = total.get("x", 0.0) / max(1.0, n)
    squares = add_up({"s": float(sum(((a - mean) ** 2).sum() for a in arrays))}).get("s", 0.0)
    deviation = np.sqrt(squares / max(1.0, n - 1))
    if n <= 1 or deviation <= 1e-12 * max(1.0, abs(mean)):
        return [np.zeros_like(a) for a in arrays]
    return [(a - mean) / (deviation + epsilon) for a in arrays]
