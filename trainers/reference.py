"""The frozen reference policy of losses with a KL penalty: the initial weights, rounded to bf16 like the trained."""

from pathlib import Path

import torch
from torch import Tensor

from headrace.trainers.backends.load_model import load_policy_model
from headrace.trainers.batching import MicroBatch

__all__ = ("Reference",)


class Reference:
    """Log-probs of the model in a Hugging Face folder; each rank holds a whole copy."""

    def __init__(self, folder: Path | str, device: torch.device) -> None:
        self._model = load_policy_model(folder).to(device).requires_grad_(False)
        for p in self._model.parameters():
            p.data.copy_(p.data.to(torch.bfloat16))

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probs [rows, length] float32 of the trained tokens, 0 elsewhere."""
        with torch.no_grad():
            out: Tensor = self._model(micro.tokens, micro.mask, micro.temperature, micro.lengths)[0]
            return out
