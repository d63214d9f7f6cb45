"""A Hugging Face causal model as a module that gives log-probs and entropies of chosen tokens only.

Sequences run side by side without padding (``packing``) and the vocabulary projection never makes the full logits
(``token_logprobs``). Whether a model can be run so is not guessed: when it is loaded a few tokens go both ways, and a
model that gives other log-probs packed runs padded, one that reworks its logits in an unknown way runs whole.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headrace.trainers.backends.adapters import published_name
from headrace.trainers.backends.packing import IMPLEMENTATION, Packing
from headrace.trainers.backends.sequence_parallel import SequenceGroup
from headrace.trainers.backends.token_logprobs import HeadShape, token_logprobs

__all__ = ("PolicyModel",)


class PolicyModel(nn.Module):
    """``forward`` gives log-probs and entropies, both [rows, length] float32, 0 where the mask is False.

    packed: sequences without padding; lean: no full logits. group: ranks that share every sequence. The module stays
    in evaluation mode: the rollout engine has no dropout, and log-probs must agree.
    """

    def __init__(
        self,
        model: Any,
        *,
        packed: bool = True,
        lean: bool = True,
        keep_bytes: int = 1 << 30,
        group: SequenceGroup | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.group = group
        self.lean = lean and _has_plain_head(model)
        self.packed = packed and self.lean and model.config._attn_implementation == IMPLEMENTATION
        self._scale = float(getattr(model.config, "logit_scale", None) or 1.0)
        self._scale /= float(getattr(model.config, "logits_scaling", None) or 1.0)
        softcap = float(getattr(model.config, "final_logit_softcapping", None) or 0.0)
        self._shape = HeadShape(softcap=softcap, keep_bytes=keep_bytes)
        if self.lean:
            head = model.get_output_embeddings()
            head.forward = MethodType(_project, head)

    def train(self, mode: bool = True) -> "PolicyModel":
        """Only layers that are checkpointed are told that they train, none of what they hold: dropout stays off."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        super().train(False)
        for layer in self.model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = layer.gradient_checkpointing
        return self

    def forward(self, tokens: Tensor, mask: Tensor, temperature: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 and mask bool [rows, length], temperature float32 and lengths int64 [rows]."""
        rows, columns = mask.nonzero(as_tuple=True)
        targets, heat = tokens[rows, columns], temperature[rows]
        if not self.lean:
            found = self._whole(tokens, rows, columns, targets, heat)
        elif self.packed:
            found = self._packed(tokens, lengths, rows, columns, targets, heat)
        else:
            hidden = self._inner(input_ids=tokens, use_cache=False).last_hidden_state
            found = self._head(hidden[rows, columns - 1], targets, heat)
        logprobs, entropy = (
            torch.zeros(tokens.shape, dtype=x.dtype, device=x.device).index_put((rows, columns), x) for x in found
        )
        return logprobs, entropy

    def published(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained and published, by the names of checkpoint or adapter files; a tied storage appears once."""
        every = [(name.removeprefix("model."), p) for name, p in self.named_parameters()]
        trained = [(name, p) for name, p in every if p.requires_grad]
        return trained if len(trained) == len(every) else [(published_name(name), p) for name, p in trained]

    @property
    def _inner(self) -> Any:
        return getattr(self.model, self.model.base_model_prefix)

    def _head(self, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        found: tuple[Tensor, Tensor] = head(hidden, targets, temperature, self._scale, self._shape)
        return found

    def _whole(
        self, tokens: Tensor, rows: Tensor, columns: Tensor, targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=tokens, use_cache=False).logits[rows, columns - 1].float()
        every = (logits / temperature[:, None]).log_softmax(-1)
        entropy = -torch.where(every == float("-inf"), 0.0, every.exp() * every).sum(-1)
        return every.gather(1, targets[:, None])[:, 0], entropy

    def _packed(
        self,
        tokens: Tensor,
        lengths: Tensor,
        rows: Tensor,
        columns: Tensor,
        targets: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor]:
        flat = tokens[torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]]
        starts = lengths.cumsum(0) - lengths
        at = starts[rows] + columns - 1
        sizes = lengths.tolist()
        group = self.group
        if group is None:
            packing = Packing(sizes, tokens.device)
            hidden = self._run(flat[None], packing.positions(), packing)
            return self._head(hidden[0, at], targets, temperature)
        more = group.padding(flat.numel())
        packing = Packing([*sizes, more] if more else sizes, tokens.device, group)
        part = group.part(packing.tokens)
        flat = torch.nn.functional.pad(flat, (0, more))
        hidden = self._run(flat[None, part], packing.positions()[:, part], packing)
        here = ((at >= part.start) & (at < part.stop)).nonzero()[:, 0]
        found = self._head(hidden[0, at[here] - part.start], targets[here], temperature[here])
        whole = torch.zeros(2, len(at), device=hidden.device)
        both = group.shared(whole.index_put((torch.arange(2, device=at.device)[:, None], here), torch.stack(found)))
        return both[0], both[1]

    def _run(self, tokens: Tensor, positions: Tensor, packing: Packing) -> Tensor:
        out = self._inner(input_ids=tokens, position_ids=positions, use_cache=False, packing=packing)
        hidden: Tensor = out.last_hidden_state
        return hidden


def _has_plain_head(model: Any) -> bool:
    """Whether a linear layer makes the logits from the inner model's last hidden state."""
    head = model.get_output_embeddings()
    inner = getattr(model, model.base_model_prefix, None)
    return type(head) is nn.Linear and inner is not None and inner is not model


def _project(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor | None = None,
    temperature: Tensor | None = None,
    scale: float = 1.0,
    shape: HeadShape | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The head's forward: with targets their log-probs and entropies, so that DeepSpeed's hooks gather its weight."""
    if targets is None or temperature is None:
        return nn.functional.linear(hidden, head.weight, head.bias)
    return token_logprobs(hidden, head.weight, targets, temperature, bias=head.bias, scale=scale, shape=shape)
