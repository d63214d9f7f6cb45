"""The flowing engine ends every sequence when the scripted engine, token by token in the same virtual time, ends it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.connectors.engines.engine import Request
from headrace.connectors.engines.scripted import ScriptedEngine
from headrace.pipeline.simulation.clock import Clock
from headrace.pipeline.simulation.engine import FlowEngine
from headrace.schemas.parts import Sampling


def run(clock: Clock) -> None:
    while clock.step():
        pass


def scripted_ends(arrivals: list[float], slots: int, step: float, row: float) -> tuple[list[float], list[int]]:
    """End time and length of each request of the scripted engine; a request enters at the next step's begin."""
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    options = {"step_seconds": step, "row_seconds": row, "mean_length": 20, "sigma": 0.7}
    engine = ScriptedEngine(slots=slots, options=options, wait=wait)
    engine.load_weights({}, 0)
    ends, lengths = [0.0] * len(arrivals), [0] * len(arrivals)
    waiting = list(enumerate(arrivals))
    while waiting or engine.active:
        if not engine.active:
            now = max(now, waiting[0][1])
        while waiting and waiting[0][1] <= now:
            key, _ = waiting.pop(0)
            engine.add(Request(key, np.array([5], np.int32), Sampling(max_new_tokens=10_000, seed=key)))
        for done in engine.step():
            ends[done.key], lengths[done.key] = now, done.tokens.size
    return ends, lengths


@settings(max_examples=20, deadline=None)
@given(
    gaps=st.lists(st.floats(0, 8), min_size=1, max_size=12),
    slots=st.integers(1, 5),
    row=st.sampled_from([0.0, 0.03, 0.1]),
)
def test_it_agrees_with_the_scripted_engine(gaps: list[float], slots: int, row: float) -> None:
    step = 0.1
    arrivals = list(np.cumsum(gaps))
    expected, lengths = scripted_ends(arrivals, slots, step, row)
    clock, ends = Clock(), [0.0] * len(arrivals)
    engine = FlowEngine(clock, slots=slots, step_seconds=step, row_seconds=row)

    def arrive(key: int) -> None:
        def done() -> None:
            ends[key] = clock.now

        engine.add(lengths[key], done)

    for key, at in enumerate(arrivals):
        clock.after(at, lambda key=key: arrive(key))
    run(clock)
    allowed = (step + row * slots) * (len(arrivals) + 1)  # each arrival and start waits for a step's begin
    assert np.abs(np.array(ends) - expected).max() <= allowed
    assert engine.tokens == pytest.approx(sum(lengths), rel=1e-6)


def test_a_dropped_sequence_frees_its_row_and_never_ends() -> None:
    clock = Clock()
    ended: list[tuple[str, float]] = []
    engine = FlowEngine(clock, slots=1, step_seconds=1.0, row_seconds=0.0)
    first = engine.add(10, lambda: ended.append(("first", clock.now)))
    engine.add(5, lambda: ended.append(("second", clock.now)))
    third = engine.add(5, lambda: ended.append(("third", clock.now)))
    clock.after(2.0, lambda: engine.abort(first))
    clock.after(3.0, lambda: engine.abort(third))
    clock.after(4.0, lambda: engine.abort(first))
    run(clock)
    assert ended == [("second", pytest.approx(7.0))]
    assert engine.tokens == pytest.approx(7.0)


def test_it_stands_still_while_weights_are_swapped() -> None:
    clock = Clock()
    ends: list[float] = []
    engine = FlowEngine(clock, slots=4, step_seconds=1.0, row_seconds=0.0, speed=0.5)
    engine.add(3, lambda: ends.append(clock.now))
    clock.after(1.0, lambda: engine.pause(10.0))
    clock.after(4.0, lambda: engine.add(1, lambda: ends.append(clock.now)))
    run(clock)
    assert ends == pytest.approx([13.0, 16.0])
    assert engine.busy == pytest.approx(6.0)
