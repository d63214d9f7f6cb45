"""The learning-rate study in miniature: how many bfloat16 weights an AdamW step changes, and what a delta of it costs.

A small transformer with float32 masters learns text of a fixed Markov chain at several learning rates after a common
start; every step is rounded to bfloat16, compared by tensor and coded. Figures are means over the last steps.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.form import Figure, main
from headrace.connectors.stores.sparsity import role_of
from headrace.schemas.delta_codec import encode_segment
from headrace.schemas.delta_layout import Piece
from headrace.schemas.delta_steps import NumpyKernels

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 2e-4)
VOCABULARY, WIDTH, LENGTH = 256, 128, 48
U16 = NDArray[np.uint16]


class Block(torch.nn.Module):
    """Attention and MLP with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o_proj = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up_proj = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        q, k, v = (part.unflatten(-1, (4, WIDTH // 4)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down_proj(torch.nn.functional.silu(self.up_proj(self.norm2(x))))


class Model(torch.nn.Module):
    """Embedding, two blocks, tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm = torch.nn.RMSNorm(WIDTH)
        torch.nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, length, vocabulary] of int64 tokens [batch, length]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


def text(rng: np.random.Generator, rows: int) -> torch.Tensor:
    """Sequences of a Markov chain with few successors."""
    follow = np.random.default_rng(1).integers(0, VOCABULARY, (VOCABULARY, 4))
    tokens = np.empty((rows, LENGTH), np.int64)
    tokens[:, 0] = rng.integers(0, VOCABULARY, rows)
    for at in range(1, LENGTH):
        tokens[:, at] = follow[tokens[:, at - 1], rng.integers(0, 4, rows)]
    return torch.from_numpy(tokens)


def step(model: Model, optimizer: torch.optim.Optimizer, rng: np.random.Generator) -> None:
    """One update with a surrogate loss that weighs each row by a random advantage, as policy gradients do."""
    tokens = text(rng, 16)
    logits = model(tokens[:, :-1]).flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none").view(16, -1)
    advantages = torch.from_numpy(rng.standard_normal((16, 1)).astype(np.float32))
    optimizer.zero_grad()
    (losses * advantages).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def bits(model: Model) -> dict[str, U16]:
    """The weights in bfloat16 bits, flat."""
    return {
        name: p.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()
        for name, p in model.named_parameters()
    }


def delta_bytes(old: Sequence[U16], new: Sequence[U16]) -> int:
    """Bytes of the change of all tensors as one segment."""
    bounds = np.cumsum([0, *(array.size for array in new)])
    pieces = [Piece(i, int(bounds[i]), int(bounds[i + 1])) for i in range(len(new))]
    frames, _ = encode_segment(np.concatenate(old), np.concatenate(new), pieces, NumpyKernels())
    return sum(len(frame.payload) for frame in frames)


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    warm = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20 if given.quick else 100):
        step(model, warm, np.random.default_rng(7))
    start = {name: value.clone().to(torch.bfloat16).float() for name, value in model.state_dict().items()}
    steps, kept = (6, 3) if given.quick else (24, 8)
    for rate in RATES:
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.0)
        rng, old = np.random.default_rng(9), bits(model)
        shares: list[float] = []
        sizes: list[int] = []
        roles: dict[str, list[float]] = {}
        for number in range(steps):
            step(model, optimizer, rng)
            new = bits(model)
            if number >= steps - kept:
                moved = {name: float((old[name] != new[name]).mean()) for name in new}
                total = sum(array.size for array in new.values())
                shares.append(sum(moved[name] * new[name].size for name in new) / total)
                sizes.append(delta_bytes(list(old.values()), list(new.values())))
                for name, share in moved.items():
                    roles.setdefault(role_of(name), []).append(share)
            old = new
        name = f"{rate:.0e}".replace("e-0", "e")
        share, size = float(np.mean(shares)), float(np.mean(sizes))
        dense = 2 * sum(array.size for array in old.values())
        lowest, highest = min(roles, key=lambda r: np.mean(roles[r])), max(roles, key=lambda r: np.mean(roles[r]))
        span = f"{lowest} {np.mean(roles[lowest]):.2%} .. {highest} {np.mean(roles[highest]):.2%}"
        yield Figure(f"changed_share_lr{name}", share, "", anchor=span)
        yield Figure(f"delta_vs_dense_lr{name}", size / dense, "", anchor="bfloat16 as it is")
        yield Figure(f"bits_per_change_lr{name}", 8 * size / max(1.0, share * dense / 2), "bits")
        if math.isclose(rate, 1e-6):
            yield Figure("sparsity_lr1e6", 1 - share, "", 0.98, True, "about 99 % in published RL runs at this rate")


if __name__ == "__main__":
    main(__doc__, measure)
