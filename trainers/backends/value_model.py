"""A Hugging Face model with a head that gives one value per token instead of logits: the critic of PPO.

It takes the place of a ``PolicyModel`` in a backend: where that gives the log-prob of a token, this gives the value of
the state before it. The head starts at 0, so a fresh critic gives 0 everywhere.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.schemas.errors import ConfigurationError

__all__ = ("ValueModel", "load_value_model")


class ValueModel(nn.Module):
    """``forward`` gives values [rows, length] float32 and zeros in the same shape, 0 where the mask is False.

    model: a causal model without its head, which gives hidden states.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(int(model.config.hidden_size), 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def train(self, mode: bool = True) -> "ValueModel":
        """The module stays in evaluation mode: without dropout a batch gives the same bits again."""
        super().train(False)
        return self

    def forward(self, tokens: Tensor, mask: Tensor, temperature: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 and mask bool [rows, length]; temperature and lengths [rows] are not looked at.

        Rows are right-padded, so what stands behind a token cannot change it.
        """
        rows, columns = mask.nonzero(as_tuple=True)
        hidden = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        found = self.head(hidden[rows, columns - 1])[:, 0].float()
        values = torch.zeros(tokens.shape, dtype=found.dtype, device=found.device).index_put((rows, columns), found)
        return values, torch.zeros_like(values)

    def published(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, by name."""
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]


def load_value_model(folder: Path | str) -> ValueModel:
    """The model of a Hugging Face folder, float32, with a fresh head. Raises ConfigurationError when there is none."""
    from transformers import AutoModel

    path = Path(folder)
    try:
        json.loads((path / "config.json").read_text("utf-8"))
        model = AutoModel.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(f"{path} cannot be loaded as the model of a critic: {error}") from error
    return ValueModel(model).train()
