"""The control: every prompt becomes a group."""

from __future__ import annotations

from prompt_feed import PromptFeed

from headrace.pipeline.operators.accept_all import AcceptAll


def test_every_prompt_is_admitted_whatever_was_learned() -> None:
    made = PromptFeed(AcceptAll)
    for n in range(5):
        assert made.offer("p", n) == ""
        made.learn("p", [1, 1])
        made.move()
    assert made.metrics.total("prompts_accepted") == 5
    assert list(made.store().scan()) == []
