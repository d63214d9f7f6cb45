"""The critic of PPO: values of states before a batch is trained, and its own updates beside the policy's.

A model with a value head in the same kind of backend as the policy, with optimizer and learning rate of its own. Its
state is saved and taken up with the policy's, so that a resumed run goes on with the same values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.backend import Backend, Snapshots, StateWriter
from headrace.trainers.backends.open import open_critic
from headrace.trainers.batching import MicroBatch
from headrace.trainers.losses.aggregation import Denominators, aggregate
from headrace.trainers.losses.value import value_loss
from headrace.trainers.ranks import Ranks

__all__ = ("Critic", "State", "check_critic", "state_of")

_FOLDER = "critic"


class Critic:
    """Values and updates of a critic. Every method is collective. Raises ConfigurationError when there can be none."""

    def __init__(self, config: TrainerConfig, folder: str, ranks: Ranks) -> None:
        check_critic(config)
        self._config, own = config.critic, config.critic.lr
        self.backend = open_critic(config.model_copy(update={"lr": own}), config.critic.model or folder, ranks)

    def values(self, micro: MicroBatch) -> Tensor:
        """The value of the state before every trained token, [rows, length] float32, without gradient."""
        return self.backend.logprobs(micro, gradient=False)

    def learn(self, micro: MicroBatch, counts: Denominators, *, last: bool) -> Mapping[str, Tensor]:
        """Forward and backward towards the micro-batch's returns; sums over trained tokens of the critic's figures."""
        new = self.backend.logprobs(micro, gradient=True)
        micro = micro.to(new.device)
        assert micro.values is not None and micro.returns is not None, "rows without returns"
        terms = value_loss(new, micro.values, micro.returns, micro.mask, self._config.clip)
        self.backend.backward(aggregate(terms.loss, micro.mask, "token-mean", counts), last=last)
        return {**terms.sums, "critic/loss": terms.loss.detach().sum()}

    def step(self, batch: int) -> Mapping[str, float]:
        """Update the weights; figures of the update."""
        rise = min(1.0, batch / self._config.warmup_steps) if self._config.warmup_steps else 1.0
        update = self.backend.step(self._config.lr * rise)
        return {"critic/lr": self._config.lr * rise, "critic/grad_norm": update.grad_norm}


class State:
    """What a checkpoint holds where there is a critic: the policy's state, and the critic's in a folder below it."""

    def __init__(self, policy: Backend, critic: Backend) -> None:
        self._policy, self._critic = policy, critic

    def save(self, folder: Path) -> None:
        """See ``Backend``."""
        self._policy.save(folder)
        self._critic.save(_below(folder))

    def load(self, folder: Path) -> None:
        """See ``Backend``. Raises ConfigurationError also when the checkpoint holds no critic."""
        if not (folder / _FOLDER).is_dir():
            raise ConfigurationError(
                f"checkpoint {folder} holds no critic; it was written by a run whose advantage has none"
            )
        self._policy.load(folder)
        self._critic.load(folder / _FOLDER)


class _Copied(State):
    """The same of backends whose state can be copied at once and written later."""

    def __init__(self, policy: Any, critic: Any) -> None:
        super().__init__(policy, critic)
        self._both: tuple[Snapshots, Snapshots] = policy, critic

    def snapshot(self) -> StateWriter:
        """See ``Snapshots``."""
        policy, critic = (backend.snapshot() for backend in self._both)
        return _Parts(policy, critic)


class _Parts:
    """See ``StateWriter``."""

    def __init__(self, policy: StateWriter, critic: StateWriter) -> None:
        self._policy, self._critic = policy, critic

    def write(self, folder: Path) -> None:
        """See ``StateWriter``."""
        self._policy.write(folder)
        self._critic.write(_below(folder))


def state_of(policy: Backend, critic: Critic | None) -> Backend:
    """What a checkpoint saves and takes up: of a backend it uses ``save``, ``load`` and ``snapshot`` only."""
    if critic is None:
        return policy
    if isinstance(policy, Snapshots) and isinstance(critic.backend, Snapshots):
        return cast(Backend, _Copied(policy, critic.backend))
    return cast(Backend, State(policy, critic.backend))


def check_critic(config: TrainerConfig) -> None:
    """Refuse settings with which there can be no critic. Raises ConfigurationError."""
    if config.sequence_parallel > 1:
        raise ConfigurationError("a critic cannot share sequences among ranks; set trainer.sequence_parallel to 1")
    if config.backend not in ("torch", "deepspeed"):
        raise ConfigurationError(f"trainer.backend {config.backend!r} has no critic; torch and deepspeed have")


def _below(folder: Path) -> Path:
    below = folder / _FOLDER
    below.mkdir(exist_ok=True)
    return below
