"""DAPO: PPO whose clip is higher above than below, and a dual clip that rarely acts."""

from typing import ClassVar

from pydantic import Field

from headrace.trainers.losses.clip import DualClip
from headrace.trainers.losses.loss import LossOptions
from headrace.trainers.losses.ppo import PPO, PPOOptions

__all__ = ("DAPO", "DAPOOptions")


class DAPOOptions(PPOOptions):
    """PPO's options with DAPO's values; combine with ``trainer.aggregation = "token-mean"``."""

    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.28, ge=0)
    dual_clip: DualClip = 10.0


class DAPO(PPO):
    """PPO with the clip range [0.8, 1.28]."""

    Options: ClassVar[type[LossOptions]] = DAPOOptions
