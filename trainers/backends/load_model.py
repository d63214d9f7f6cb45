"""Loads the model of a Hugging Face folder for training, and finds out how it can be run.

Goes in: a folder and the trainer's settings; comes out: a float32 ``PolicyModel``, with adapters and activation
checkpointing where asked for, that is known to give the model's own log-probs in the way it will be run.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.adapters import add_adapters
from headrace.trainers.backends.packing import IMPLEMENTATION, register
from headrace.trainers.backends.policy_model import PolicyModel
from headrace.trainers.backends.sequence_parallel import SequenceGroup
from headrace.trainers.ranks import Ranks

__all__ = ("load_policy_model",)

_NEAR = 1e-3
"""Largest difference of log-probs in float32 between two ways to run a model that count as the same, in nats."""


def load_policy_model(
    folder: Path | str, config: TrainerConfig | None = None, ranks: Ranks | None = None
) -> PolicyModel:
    """The model of a folder in float32. Raises ConfigurationError when there is none or it cannot do what is set.

    config: adapters, activation checkpointing, packing and memory of the logits; None: as for a reference model.
    ranks: those that share sequences find each other; collective then.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    register()
    model = _load(Path(folder))
    if config is not None and config.lora.rank:
        add_adapters(model, config.lora)
    policy = _fastest(model, config, Path(folder))
    if ranks is not None and ranks.sharing > 1:
        policy.group = SequenceGroup(ranks.rank % ranks.sharing, ranks.sharing, ranks.neighbours())
        _check_sharing(policy, policy.group, Path(folder))
    if config is not None and config.activation_checkpointing:
        _checkpoint_activations(model, reentrant=config.backend == "deepspeed" and config.zero_stage == 3)
    return policy.train()


def _load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        json.loads((path / "config.json").read_text("utf-8"))
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(f"{path} cannot be loaded as a causal language model: {error}") from error
    if getattr(model.config, "attn_logit_softcapping", None):
        _attend(model, "eager")  # the others leave out the cap in silence
    return model.eval()


def _fastest(model: Any, config: TrainerConfig | None, path: Path) -> PolicyModel:
    """The model in the leanest way that gives its own log-probs on a few tokens."""
    own = model.config._attn_implementation
    keep = (config.logits_memory_mb << 20) if config is not None else 0
    packs = config is None or config.packing
    sample = _sample(int(model.config.vocab_size))
    wanted = _scores(PolicyModel(model, packed=False, lean=False), sample)
    failed = []
    for packed, lean in ((True, True), (False, True), (False, False)):
        if packed and not (packs and _attends_by_name(model)):
            continue
        _attend(model, IMPLEMENTATION if packed else own)
        policy = PolicyModel(model, packed=packed, lean=lean, keep_bytes=keep)
        try:
            if policy.lean == lean and _near(_scores(policy, sample), wanted):
                break
            failed.append(("packed sequences" if packed else "logits in slices") + " (other log-probs)")
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, AssertionError) as error:
            # A model that cannot take packed sequences fails in its own way; the next way is slower and always works.
            failed.append(f"{'packed sequences' if packed else 'logits in slices'} ({error})")
    if failed:
        sys.stderr.write(f"{path} ({type(model).__name__}) takes more memory: it cannot do {', '.join(failed)}\n")
    return policy


def _attends_by_name(model: Any) -> bool:
    """Whether every layer is attention of a kind that packed rows have, called by the name that is set."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    chunked = getattr(model.config, "attention_chunk_size", None)
    named = getattr(model, "_supports_attention_backend", False)
    return bool(named) and not chunked and kinds <= {"full_attention", "sliding_attention"}


def _attend(model: Any, name: str) -> None:
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)


def _sample(vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three rows of different lengths: tokens, mask, temperature, lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 11, 6])
    tokens = torch.randint(0, vocabulary, (3, 11), generator=generator)
    inside = torch.arange(11) < lengths[:, None]
    tokens[~inside] = 0
    mask = inside.clone()
    mask[:, 0] = False
    return tokens, mask, torch.tensor([1.0, 0.7, 1.3]), lengths


def _scores(policy: PolicyModel, sample: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = policy(*sample)
    return found


def _near(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=_NEAR, rtol=_NEAR) for a, b in zip(found, wanted, strict=True))


def _check_sharing(policy: PolicyModel, group: SequenceGroup, path: Path) -> None:
    """Refuse a model whose sequences or heads cannot be shared among the ranks of a group."""
    if not policy.packed:
        raise ConfigurationError(f"{path} cannot run packed, so trainer.sequence_parallel has to be 1")
    config = policy.model.config
    heads = int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % group.size or (keys % group.size and group.size % keys):
        raise ConfigurationError(
            f"trainer.sequence_parallel {group.size} does not divide the heads of {path} ({heads}, of keys {keys})"
        )


def _checkpoint_activations(model: Any, *, reentrant: bool) -> None:
    """Make the inputs of layers the only activations that are kept; the rest is computed again in backward."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigurationError(f"{type(model).__name__} cannot checkpoint activations; switch it off")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    # DeepSpeed's kind of checkpoint warns of every forward pass that nothing is trained on.
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    model.enable_input_require_grads()  # the embedding may be frozen, and reentrant checkpoints need a gradient
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            for name, value in vars(layer).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)
