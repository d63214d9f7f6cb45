"""Attention on a packed row is attention on each sequence alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.trainers.backends.packing import Packing, packed_attention

LENGTHS = [3, 40, 1, 12, 11, 41, 2]


def module(**config: Any) -> Any:
    found = torch.nn.Module()
    found.config = SimpleNamespace(**config)
    found.layer_idx = 0
    return found


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("keys", [4, 2, 1], ids=lambda n: f"{n} key heads")
@pytest.mark.parametrize("size", [8, 6], ids=["values of the same size", "smaller values"])
def test_each_sequence_attends_to_itself_only(window: int | None, keys: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    query = torch.randn(1, 4, tokens, 8, generator=generator, requires_grad=True)
    key = torch.randn(1, keys, tokens, 8, generator=generator, requires_grad=True)
    value = torch.randn(1, keys, tokens, size, generator=generator, requires_grad=True)
    packing = Packing(LENGTHS, query.device)
    out, _ = packed_attention(
        module(), query, key, value, None, packing=packing, scaling=0.3, sliding_window=window, dropout=0.0
    )
    assert out.shape == (1, tokens, 4, size)
    alone, at = [], 0
    for n in LENGTHS:
        q, k, v = (x[0, :, at : at + n].repeat_interleave(4 // x.shape[1], 0) for x in (query, key, value))
        away = torch.arange(n)[:, None] - torch.arange(n)
        seen = (away >= 0) & (away < (window or n))
        weights = (q @ k.transpose(1, 2) * 0.3).masked_fill(~seen, float("-inf")).softmax(-1)
        alone.append((weights @ v).transpose(0, 1))
        at += n
    wanted = torch.cat(alone)[None]
    assert torch.allclose(out, wanted, atol=1e-6)
    factors = torch.randn(wanted.shape, generator=generator)
    mine, other = (torch.autograd.grad((x * factors).sum(), (query, key, value)) for x in (out, wanted))
    for a, b in zip(mine, other, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_positions_begin_anew_and_buckets_waste_little() -> None:
    packing = Packing(LENGTHS, torch.device("cpu"))
    assert packing.positions().tolist() == [[i for n in LENGTHS for i in range(n)]]
    assert packing.cumulative().tolist() == [0, 3, 43, 44, 56, 67, 108, 110]
    buckets, order = packing.buckets()
    assert sorted(order.tolist()) == list(range(sum(LENGTHS)))
    padded = sum(b.rows * b.width for b in buckets)
    assert padded < 1.4 * sum(LENGTHS) < len(LENGTHS) * max(LENGTHS)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({}, {"position_bias": torch.zeros(4)}),
        ({"layer_types": ["sliding_attention"]}, {}),
        ({"sliding_window": 4}, {}),
    ],
    ids=["bias", "window by kind of layer", "window by configuration"],
)
def test_attention_of_another_kind_is_refused(config: dict[str, Any], arguments: dict[str, Any]) -> None:
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="attention with"):
        packed_attention(module(**config), x, x, x, None, packing=Packing([2], x.device), **arguments)
