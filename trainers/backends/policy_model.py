"""A Hugging Face causal model as a module that gives log-probs of chosen tokens only.

The vocabulary projection runs on the hidden states of trained tokens, never on the padding or the prompt. Rows are
right-padded, so causal attention needs no mask: what stands behind a token cannot change it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.schemas.errors import ConfigurationError

__all__ = ("PolicyModel", "load_policy_model")

_REWORKED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings by which a model changes its logits after the projection; such models run whole."""


class PolicyModel(nn.Module):
    """``forward`` gives log-probs [rows, length] float32, 0 where the mask is False."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        config = model.config
        whole = any(getattr(config, name, None) for name in _REWORKED_LOGITS)
        self.split = not whole and hasattr(model, "lm_head") and hasattr(model, "model")

    def forward(self, tokens: Tensor, mask: Tensor, temperature: Tensor) -> Tensor:
        """tokens int64 and mask bool [rows, length], temperature float32 [rows]."""
        rows, columns = mask.nonzero(as_tuple=True)
        if self.split:
            hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[rows, columns - 1]).float()
        else:
            logits = self.model(input_ids=tokens, use_cache=False).logits[rows, columns - 1].float()
        logits = logits / temperature[rows, None]
        chosen = -nn.functional.cross_entropy(logits, tokens[rows, columns], reduction="none")
        return torch.zeros(tokens.shape, dtype=chosen.dtype, device=chosen.device).index_put((rows, columns), chosen)


def load_policy_model(folder: Path | str) -> PolicyModel:
    """The model of a Hugging Face folder, float32, without dropout. Raises ConfigurationError when there is none."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = Path(folder)
    try:
        json.loads((path / "config.json").read_text("utf-8"))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(f"{path} cannot be loaded as a causal language model: {error}") from error
    return PolicyModel(model).eval()  # no dropout: the rollout engine has none, and log-probs must agree
