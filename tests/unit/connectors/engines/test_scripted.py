"""The scripted engine: lengths by seed, time by the given clock, true version labels."""

from __future__ import annotations

import numpy as np

from headrace.connectors.engines.engine import Request, generate
from headrace.connectors.engines.scripted import ScriptedEngine
from headrace.schemas.parts import Sampling


def _requests(n: int, new: int = 1000) -> list[Request]:
    return [Request(i, np.array([5], np.int32), Sampling(max_new_tokens=new, seed=i)) for i in range(n)]


def test_lengths_have_the_mean_asked_for_and_follow_from_the_seed() -> None:
    options = {"mean_length": 20.0, "sigma": 0.6}
    engine = ScriptedEngine(slots=64, options=options)
    engine.load_weights({}, 0)
    done = generate(engine, _requests(2000))
    lengths = np.array([d.tokens.size for d in done])
    assert abs(lengths.mean() - 20) < 1
    assert {d.end_reason for d in done} == {"stop"}
    alone = ScriptedEngine(slots=1, options=options)
    alone.load_weights({}, 0)
    assert [d.tokens.tolist() for d in generate(alone, _requests(20))] == [d.tokens.tolist() for d in done[:20]]


def test_time_passes_by_the_clock_given() -> None:
    waited: list[float] = []
    engine = ScriptedEngine(slots=2, options={"step_seconds": 1.0, "row_seconds": 0.5}, wait=waited.append)
    engine.load_weights({}, 0)
    generate(engine, _requests(2, new=3))
    assert set(waited) <= {2.0, 1.5}
    assert waited[0] == 2.0


def test_versions_label_tokens_and_a_share_of_log_probs_breaks() -> None:
    engine = ScriptedEngine(slots=4, options={"sigma": 0.0, "mean_length": 6})
    engine.load_weights({}, 1)
    engine.add(_requests(1)[0])
    for version in range(2, 8):
        done = engine.step()
        engine.load_weights({}, version)
    assert done[0].versions.tolist() == [1, 2, 3, 4, 5, 6]
    broken = ScriptedEngine(slots=64, options={"nan_share": 0.25})
    broken.load_weights({}, 0)
    share = np.mean([not np.isfinite(d.logprobs).all() for d in generate(broken, _requests(1000))])
    assert 0.2 < share < 0.3
