"""Rows against a plain list of sequences: what enters, grows, ends and leaves is never mixed up."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.connectors.engines.engine import Request
from headrace.connectors.engines.rows import Rows
from headrace.schemas.parts import Sampling

STOP = 7


def _rows(capacity: int = 8, context: int = 1000) -> Rows:
    stops = np.zeros(16, np.bool_)
    stops[STOP] = True
    return Rows(capacity, stops, context)


def _request(key: int, prompt: int, new: int) -> Request:
    return Request(key, np.zeros(prompt, np.int32), Sampling(max_new_tokens=new, seed=key))


@pytest.mark.parametrize("seed", range(10))
def test_rows_behave_as_a_list_of_sequences(seed: int) -> None:
    r = random.Random(seed)
    rows, plain = _rows(), {}
    order: list[int] = []
    key = 0
    for step in range(200):
        coming = [_request(key + i, r.randint(1, 9), r.randint(1, 90)) for i in range(r.randint(0, 8 - rows.count))]
        key += len(coming)
        rows.enter(coming)
        order += [request.key for request in coming]
        plain.update({request.key: (request, []) for request in coming})
        assert rows.keys[: rows.count].tolist() == order
        tokens = np.array([r.randrange(0, 40) % 16 for _ in order], np.int32)
        ends = rows.append(slice(0, rows.count), tokens, -tokens.astype(np.float32), step)
        gone = []
        for row, (name, token, end) in enumerate(zip(order, tokens, ends, strict=True)):
            request, made = plain[name]
            made.append((int(token), step))
            expected = "stop" if token == STOP else "length" if len(made) == request.sampling.max_new_tokens else ""
            assert bool(end) == bool(expected)
            if expected:
                generation = rows.generation(row, int(end))
                assert generation.end_reason == expected
                assert list(zip(generation.tokens.tolist(), generation.versions.tolist(), strict=True)) == made
                assert generation.logprobs.tolist() == [-t for t, _ in made]
                gone.append(row)
        source, target = rows.leave(np.array(gone, np.int64))
        for s, t in zip(source, target, strict=True):
            order[t] = order[s]
        order = order[: rows.count]
        assert all(rows.find(name) == row for row, name in enumerate(order))
    assert rows.find(10**6) == -1


def test_the_context_ends_a_row_when_prompt_and_completion_fill_it() -> None:
    rows = _rows(context=5)
    rows.enter([_request(1, 3, 100)])
    one = np.array([1], np.int32)
    assert rows.append(slice(0, 1), one, one.astype(np.float32), 0).tolist() == [0]
    rows.cached[0] += 1
    (end,) = rows.append(slice(0, 1), one, one.astype(np.float32), 0)
    assert rows.generation(0, int(end)).end_reason == "context_full"
