"""Low-rank adapters in a model that trains nothing else, and how they are published.

Goes in: a model and ``[trainer.lora]``; comes out: the model with peft's adapters injected. What is published has
peft's names for an adapter file, beside one number that says how the product of the two matrices is scaled.
"""

from typing import Any

import numpy as np
import torch

from headrace.connectors.adapters import SCALING
from headrace.schemas.config import LoraConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.backend import Weights

__all__ = ("add_adapters", "constants_of", "published_name")

_NAME = "default"


def add_adapters(model: Any, lora: LoraConfig) -> None:
    """Freeze the model on its bf16 rounding and add adapters that change nothing yet.

    They are the same on every rank and after a restart: drawn from torch's initial seed, which the run sets. Raises
    ConfigurationError without peft, or when no module has one of the names.
    """
    try:
        from peft import LoraConfig as PeftLora
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigurationError(f"trainer.lora needs peft, which cannot be imported ({error}): install it") from error
    targets: Any = lora.targets[0] if lora.targets == ["all-linear"] else lora.targets
    for p in model.parameters():
        p.requires_grad_(False)
        p.data.copy_(p.data.to(torch.bfloat16))
    alpha: Any = lora.scaling * lora.rank  # peft declares an integer and divides
    settings = PeftLora(r=lora.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        try:
            inject_adapter_in_model(settings, model, adapter_name=_NAME)
        except ValueError as error:
            raise ConfigurationError(f"trainer.lora.targets {lora.targets} do not fit the model: {error}") from error


def published_name(name: str) -> str:
    """The name in an adapter file of a parameter that peft made."""
    return "base_model.model." + name.replace(f".{_NAME}.", ".")


def constants_of(lora: LoraConfig) -> Weights:
    """What is published beside the trained weights and never changes."""
    if not lora.rank:
        return {}
    bits = torch.tensor([lora.scaling], dtype=torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return {SCALING: bits}
