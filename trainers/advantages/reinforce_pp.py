"""REINFORCE++: discounted returns of the reward, whitened over all tokens of the batch; no group is needed."""

from headrace.trainers.advantages.returns import Returns

__all__ = ("ReinforcePP",)


class ReinforcePP(Returns):
    """``whiten(G_t)`` with ``G_t = r_t + gamma G_(t+1)``."""
