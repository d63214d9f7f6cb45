"""GRPO: PPO's clipped loss on group advantages; its KL penalty is an option that every loss has."""

from headrace.trainers.losses.ppo import PPO

__all__ = ("GRPO",)


class GRPO(PPO):
    """PPO; the paper's penalty to the reference is ``kl_weight`` (0.04 there, 0.001 is usual, 0 leaves it out)."""
