"""A bounded memory of prompts that comes back as it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prompt_feed import make_offer

from headrace.pipeline.operators.prompt_history import PromptHistory
from headrace.pipeline.runtime.store import MemoryStore, StoreView

STEPS = st.lists(st.tuples(st.sampled_from("abcdeä\0/"), st.sampled_from(["put", "forget", "restart"])), max_size=40)


@given(steps=STEPS, limit=st.integers(1, 4))
def test_after_any_steps_a_restored_memory_is_the_same(steps: list[tuple[str, str]], limit: int) -> None:
    store, expected = StoreView(MemoryStore(), b"s"), dict[str, int]()
    made, whole, never_lost = PromptHistory(limit), PromptHistory(limit), StoreView(MemoryStore(), b"s")
    for number, (name, what) in enumerate(steps):
        prompt = make_offer(name).prompt
        if what == "put":
            made.put(prompt, number, store)
            whole.put(prompt, number, never_lost)
            expected.pop(name, None)
            expected[name] = number
            if len(expected) > limit:
                del expected[next(iter(expected))]
        elif what == "forget":
            made.forget(prompt, store)
            whole.forget(prompt, never_lost)
            expected.pop(name, None)
        else:
            made = PromptHistory(limit)
            made.load(store)
        assert {n: made.get(make_offer(n).prompt) for n in "abcdeä\0/"} == {n: expected.get(n) for n in "abcdeä\0/"}
        assert len(made) == len(expected) <= limit
        assert list(store.scan()) == list(never_lost.scan()), "byte by byte what one that lives has"


def test_streams_do_not_share_what_is_remembered() -> None:
    store, made = StoreView(MemoryStore(), b"s"), PromptHistory(9)
    made.put(make_offer("p", stream="one").prompt, 1, store)
    assert made.get(make_offer("p", stream="two").prompt) is None
