"""Opens the backend that ``trainer.backend`` names, around the model of a Hugging Face folder."""

from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.backend import Backend
from headrace.trainers.backends.policy_model import load_policy_model
from headrace.trainers.ranks import Ranks

__all__ = ("open_backend",)


def open_backend(config: TrainerConfig, folder: str, ranks: Ranks) -> Backend:
    """The backend ``torch`` or ``deepspeed``; only the one asked for is imported. Raises ConfigurationError."""
    if config.backend == "torch":
        from headrace.trainers.backends.torch_plain import PlainTorch

        return PlainTorch(load_policy_model(folder), config, ranks)
    if config.backend == "deepspeed":
        from headrace.trainers.backends.deepspeed import DeepSpeed

        return DeepSpeed(load_policy_model(folder), config, ranks)
    raise ConfigurationError(f"trainer.backend is {config.backend!r}; backends are torch and deepspeed")
