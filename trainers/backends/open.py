"""Opens the backend that ``trainer.backend`` names, around the model of a Hugging Face folder."""

from typing import cast

from headrace.connectors.plugins import load
from headrace.schemas.config import RunConfig, TrainerConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.backend import Backend
from headrace.trainers.ranks import Ranks

__all__ = ("open_backend", "open_critic", "open_deepspeed", "open_rank", "open_torch")

_METHODS = ("logprobs", "backward", "step", "weights", "shapes", "shards", "save", "load")


def open_rank(config: RunConfig, policy: str) -> tuple[Ranks, Backend]:
    """This process as a rank of a policy's trainer, with its threads and seed, and its backend; collective."""
    import torch

    trainer = config.trainer_of(policy)
    torch.set_num_threads(trainer.threads)
    torch.manual_seed(config.run.seed)
    ranks = Ranks.from_environment(group=trainer.backend == "deepspeed", sharing=trainer.sequence_parallel)
    return ranks, open_backend(trainer, config.policies[policy].model, ranks)


def open_backend(config: TrainerConfig, folder: str, ranks: Ranks) -> Backend:
    """The backend of that name, or behind ``module:Class``; only the one asked for is imported.

    What is found is called with the same arguments as this function. Raises ConfigurationError when there is none of
    that name, or what it gives lacks a method of ``Backend``.
    """
    backend: Backend = load("headrace.backends", config.backend)(config, folder, ranks)
    missing = [name for name in _METHODS if not callable(getattr(backend, name, None))]
    if missing:
        raise ConfigurationError(
            f"trainer.backend {config.backend!r} gives a {type(backend).__name__} without {', '.join(missing)}; see "
            "headrace.trainers.backends.backend.Backend for what a backend has to do"
        )
    return backend


def open_torch(config: TrainerConfig, folder: str, ranks: Ranks) -> Backend:
    """Plain torch: replicated weights."""
    from headrace.trainers.backends.load_model import load_policy_model
    from headrace.trainers.backends.torch_plain import PlainTorch

    return PlainTorch(load_policy_model(folder, config, ranks), config, ranks)


def open_deepspeed(config: TrainerConfig, folder: str, ranks: Ranks) -> Backend:
    """DeepSpeed: ZeRO 0 to 3."""
    from headrace.trainers.backends.deepspeed import DeepSpeed
    from headrace.trainers.backends.load_model import load_policy_model

    return DeepSpeed(load_policy_model(folder, config, ranks), config, ranks)


def open_critic(config: TrainerConfig, folder: str, ranks: Ranks) -> Backend:
    """A model with a value head in plain torch or DeepSpeed, which gives values as its log-probs."""
    from headrace.trainers.backends.policy_model import PolicyModel
    from headrace.trainers.backends.value_model import load_value_model

    plain = config.model_copy(update={"lora": type(config.lora)()})
    if config.backend == "torch":
        from headrace.trainers.backends.torch_plain import PlainTorch

        return PlainTorch(cast(PolicyModel, load_value_model(folder)), plain, ranks)
    from headrace.trainers.backends.deepspeed import DeepSpeed

    return DeepSpeed(cast(PolicyModel, load_value_model(folder)), plain, ranks)
