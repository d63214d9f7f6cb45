"""Keys and values by row, against a plain dictionary: what is attended to is what was written for that row."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headrace.connectors.engines.kv_cache import KeyValueCache

HEADS, SIZE, LAYERS = 2, 3, 2


def _states(rows: int, tokens: int, start: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that are all different."""
    n = rows * HEADS * tokens * SIZE
    keys = torch.arange(start, start + n).reshape(rows, HEADS, tokens, SIZE)
    return keys, -keys - 1


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_enter_grow_and_leave_keep_their_own_keys_and_values(seed: int) -> None:
    """The schedule of an engine: prompts enter padded, every row grows by one, the last rows fill the holes."""
    dice = random.Random(seed)
    cache = KeyValueCache(6)
    plain: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = []  # row -> layer -> position
    start = 0.0
    for _ in range(40):
        coming = dice.randint(0, 6 - len(plain))
        if coming:
            sizes = [dice.randint(1, 90) for _ in range(coming)]
            first, width = len(plain), max(sizes)
            cache.begin_prefill(first, width)
            plain += [[[] for _ in range(LAYERS)] for _ in range(coming)]
            for layer in range(LAYERS):
                keys, values = _states(coming, width, start)
                start += keys.numel()
                got = cache.update(keys, values, layer)
                assert got[0] is keys, "a prompt attends to itself"
                for i, size in enumerate(sizes):
                    plain[first + i][layer] += [(keys[i, :, p], values[i, :, p]) for p in range(size)]
        if not plain:
            continue
        lengths = [len(row[0]) for row in plain]
        cache.begin_decode(torch.tensor(lengths), 1 + max(lengths))
        for layer in range(LAYERS):
            keys, values = _states(len(plain), 1, start)
            start += keys.numel()
            all_keys, all_values = cache.update(keys, values, layer)
            assert all_keys.shape == (len(plain), HEADS, 1 + max(lengths), SIZE)
            for i, row in enumerate(plain):
                row[layer].append((keys[i, :, 0], values[i, :, 0]))
                expected_keys = torch.stack([k for k, _ in row[layer]], 1)
                expected_values = torch.stack([v for _, v in row[layer]], 1)
                assert torch.equal(all_keys[i, :, : len(row[layer])], expected_keys)
                assert torch.equal(all_values[i, :, : len(row[layer])], expected_values)
        gone = sorted(dice.sample(range(len(plain)), dice.randint(0, len(plain))))
        left = len(plain) - len(gone)
        target = [row for row in gone if row < left]
        source = [row for row in range(left, len(plain)) if row not in gone]
        cache.move(np.array(source, np.int64), np.array(target, np.int64), 1 + max(lengths))
        for s, t in zip(source, target, strict=True):
            plain[t] = plain[s]
        plain = plain[:left]
    assert cache.get_seq_length() == 0


def test_memory_doubles_with_the_longest_sequence_and_keeps_what_is_there() -> None:
    cache = KeyValueCache(1)
    widths = []
    for width in (1, 64, 65, 300, 10):
        cache.begin_prefill(0, width)
        cache.update(*_states(1, width, width), 0)
        widths.append(cache._layers[0][0].shape[2])
    assert widths == [64, 64, 128, 300, 300]
    keys, _ = _states(1, 10, 10)
    assert torch.equal(cache._layers[0][0][0, :, :10], keys[0])
    older, _ = _states(1, 300, 300)
    assert torch.equal(cache._layers[0][0][0, :, 10:300], older[0, :, 10:])


def test_nothing_to_move_is_nothing_done() -> None:
    cache = KeyValueCache(2)
    cache.move(np.empty(0, np.int64), np.empty(0, np.int64), 5)
    assert cache._layers == []
