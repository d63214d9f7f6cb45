"""Waiting prompts and pacing (protocol 3)."""

from __future__ import annotations

import pytest
from stage_feed import make_config, make_prompt

from headrace.pipeline.admission import PAUSE_ABOVE, RESUME_BELOW, Waiting, openings
from headrace.pipeline.credits import Credits
from headrace.pipeline.runtime.store import MemoryStore, StoreView


def test_prompts_wait_in_order_a_retry_behind_all_and_everything_comes_back() -> None:
    store, waiting = StoreView(MemoryStore(), b"s"), Waiting()
    for number in range(3):
        waiting.add(make_prompt(number), 10 + number, store)
    first = waiting.take("main", store)
    assert (first.prompt.prompt_id, first.offset) == ("main-0", 10)
    waiting.add(first.prompt, first.offset, store, retry=1, policies=(1,))
    again = Waiting()
    again.load(store)
    order = [again.take("main", store) for _ in range(3)]
    assert [(w.prompt.prompt_id, w.retry, w.policies) for w in order] == [
        ("main-1", 0, ()),
        ("main-2", 0, ()),
        ("main-0", 1, (1,)),
    ]
    assert again.count == 0 and again.heads() == [] and list(store.scan()) == []


def test_pause_has_two_marks() -> None:
    store, waiting = StoreView(MemoryStore(), b"s"), Waiting()
    for number in range(PAUSE_ABOVE):
        waiting.add(make_prompt(number), number, store)
    assert not waiting.wants_pause()
    waiting.add(make_prompt(0), 0, store)
    assert waiting.wants_pause()
    while waiting.count >= RESUME_BELOW:
        assert waiting.wants_pause()
        waiting.take("main", store)
    assert not waiting.wants_pause()


@pytest.mark.parametrize(
    ("pacing", "rolling", "stopped", "expected"),
    [
        ("any", (0, 0), (), [0, 1]),
        ("any", (2, 0), (), [1]),
        ("any", (2, 2), (), []),
        ("all", (0, 0), (), [0, 1]),
        ("all", (2, 0), (), []),
        ("all", (2, 0), (0,), [1]),
        ("a", (0, 2), (), [0]),
        ("a", (2, 0), (), []),
        ("a", (2, 0), (0,), [1]),
        ("any", (0, 0), (0, 1), []),
    ],
)
def test_pacing(pacing: str, rolling: tuple[int, int], stopped: tuple[int, ...], expected: list[int]) -> None:
    policies = {"a": {"model": "none", "depth": 0}, "b": {"model": "none", "depth": 0}}
    config = make_config(policies=policies, pacing=pacing)
    figures = Credits(config, frozenset()).policies
    for p, count in zip(figures, rolling, strict=True):
        p.rolling = count
        p.stopped = p.index in stopped
    assert openings("main", (), config, figures) == [(p, 2) for p in expected]


def test_a_retry_opens_only_for_the_policies_that_failed() -> None:
    config = make_config(policies={"a": {"model": "none"}, "b": {"model": "none"}})
    assert openings("main", (1,), config, Credits(config, frozenset()).policies) == [(1, 4)]
