"""The sections of a run's configuration that concern training: trainer, adapters, critic, and where figures go.

Part of ``config``, which composes and checks the whole and is where these are imported from.
"""

import math
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ("CriticConfig", "LoraConfig", "MetricsConfig", "Section", "TrainerConfig")


class Section(BaseModel):
    """A part of the configuration: immutable, refuses unknown keys and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraConfig(Section):
    """``[trainer.lora]``: low-rank adapters (peft); off while ``rank`` is 0."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters."""
    alpha: float = Field(0.0, ge=0)
    """The adapters' product is scaled by alpha / rank, which has to be a power of two; 0: by 1."""
    targets: list[str] = Field(default_factory=lambda: ["all-linear"])
    """Names of the modules that get an adapter; ``all-linear``: every linear layer but the head."""

    @property
    def scaling(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / self.rank if self.rank and self.alpha else 1.0

    @model_validator(mode="after")
    def _scaling_is_exact(self) -> Self:
        if math.frexp(self.scaling)[0] != 0.5:
            raise ValueError(
                f"alpha {self.alpha:g} / rank {self.rank} is {self.scaling:g}, no power of two: adapters are published "
                "with their scaling applied, which is only exact for powers of two"
            )
        return self


class CriticConfig(Section):
    """``[trainer.critic]``: the model that estimates values, for advantages such as ``gae``; else there is none."""

    model: str = ""
    """Folder of a Hugging Face model to start from; empty: the policy's own."""
    lr: float = Field(1e-5, gt=0, allow_inf_nan=False)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    clip: float = Field(0.5, ge=0)
    """Values get no credit for moving further than this in one batch; 0: no clip."""
    alone: int = Field(0, ge=0)
    """First batches that train the critic only; the policy's weights stay as they are."""


class TrainerConfig(Section):
    """``[trainer]``: how batches become versions; ``[policies.P.trainer]`` overrides single keys."""

    backend: str = "deepspeed"
    """``deepspeed``, ``torch``, another installed backend's name, or ``module:Class``."""
    ranks: int = Field(1, ge=1)
    """Trainer processes of a policy."""
    batch_groups: int = Field(32, ge=1)
    """B: groups of a batch."""
    max_steps: int = Field(0, ge=0)
    """Versions after which the policy stops; 0: only the data's end stops it."""
    max_samples: int = Field(0, ge=0)
    """Trained trajectories, replayed ones too, after whose batch the policy stops; 0: no such end."""
    loss: str = "decoupled_ppo"
    """Name of the loss plug-in."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the loss's own."""
    advantage: str = "group"
    """Name of the advantage plug-in."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the advantage's own."""
    aggregation: str = "token-mean"
    """How losses of tokens become the loss of a batch."""
    aggregation_unit: Literal["trajectory", "sequence"] = "trajectory"
    """What counts as one sequence there: a trajectory of 30 sequences weighs 1, or 30; no matter in token-mean."""
    prox: Literal["forward", "loglinear", "linear", "behave"] = "forward"
    """With several updates a batch: a forward pass for the log-probs before it, or an approximation between behave and
    new."""
    critic: CriticConfig = CriticConfig()
    """The critic of advantages that need values."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps of a batch; it is split by whole groups."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch."""
    lr: float = Field(1e-6, gt=0, allow_inf_nan=False)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are clipped to this norm; 0: not at all."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Tokens of one forward pass at most."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Arithmetic of forward and backward pass."""
    zero_stage: int = Field(1, ge=0, le=3)
    """DeepSpeed's ZeRO stage."""
    checkpoint_every: int = Field(10, ge=1)
    """Versions between two checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """The newest checkpoints that are kept; that of a rollback stays as well."""
    keep_checkpoint_every: int = Field(0, ge=0)
    """Also keep those of batches that are multiples of this, to go back to them or train from the log; 0: none."""
    checkpoint_url: str = ""
    """Where checkpoints go: empty: the run folder, which all ranks must share; ``store``: the run's object store; or
    ``s3://bucket/prefix`` or ``file:///folder``, reached with the other settings of ``[store]``."""
    checkpoint_beside: bool = True
    """Write a checkpoint beside the next steps: the trainer waits for a copy of the state in host memory only."""
    full_every: int = Field(20, ge=1)
    """A full snapshot of the weights every so many versions."""
    publish_ahead: bool = False
    """Publish a version beside the next step: the trainer waits for a copy of the weights only."""
    delta_context: bool = False
    """Code deltas by old exponent: about a third fewer bytes at less than half the speed, for slow links."""
    last_batch: Literal["train", "drop"] = "train"
    """What happens with a last short batch."""
    threads: int = Field(1, ge=1)
    """Threads of a trainer process."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the backend's own (for DeepSpeed: merged into its configuration)."""
    prefetch_mb: int = Field(256, ge=0)
    """Memory for batches that each rank reads before it trains on them."""
    packing: bool = True
    """Run sequences side by side without padding, where the model can."""
    logits_memory_mb: int = Field(1024, ge=0)
    """Logits kept from forward to backward at most; what is beyond is computed again."""
    activation_checkpointing: bool = False
    """Keep the inputs of layers only and compute the rest again in backward."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that share the tokens of every sequence (Ulysses); a divisor of the ranks and of the attention heads."""
    moe_leaf_modules: list[str] = Field(default_factory=list)
    """Classes of mixture-of-experts blocks that ZeRO 3 gathers whole, such as ``Qwen3MoeSparseMoeBlock``."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Train low-rank adapters instead of the weights; versions then hold the adapters only."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; decay rates are from 0 to below 1")
        place = self.checkpoint_url
        if place not in ("", "store") and "://" not in place and not place.startswith("/"):
            raise ValueError(
                f"checkpoint_url is {place!r}: give store, s3://bucket/prefix or file:///folder; a folder below "
                "wherever a trainer happens to be started would not be found again"
            )
        # One rank here may be many of a launcher across machines; they are counted when they start.
        if self.ranks > 1 and self.ranks % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel {self.sequence_parallel} does not divide the {self.ranks} ranks: every sequence is "
                "shared by so many; set ranks to a multiple of it"
            )
        return self


class MetricsConfig(Section):
    """``[metrics]``: where figures of training go beside ``metrics.jsonl`` and the topic ``steps``."""

    sinks: list[str] = Field(default_factory=list)
    """Names of sink plug-ins: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``."""
    project: str = "headrace"
    """Project or experiment under which tools show the run."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """``[metrics.options.NAME]``: settings of a sink's own; keys and tokens belong in the environment."""

    @model_validator(mode="after")
    def _without_secrets(self) -> Self:
        for name, options in self.options.items():
            if name not in self.sinks:
                raise ValueError(f"options.{name} are of no sink; sinks are {', '.join(self.sinks) or 'none'}")
            for key in options:
                if any(word in key.lower() for word in ("key", "token", "password", "secret")):
                    raise ValueError(f"options.{name}.{key} would be written into the run folder; use the environment")
        return self
