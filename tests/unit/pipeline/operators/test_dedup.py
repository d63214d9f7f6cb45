"""What was sampled twice is trained once: in a group, in a window of groups, before and after a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from operator_feed import OperatorFeed, make_draft, statuses

from headrace.pipeline.operators.dedup import Dedup, DedupConfiguration, digest_of
from headrace.pipeline.operators.operator import GroupDraft


def opened(feed: OperatorFeed, **options: Any) -> Dedup:
    operator = Dedup(DedupConfiguration(**options))
    operator.open(feed)
    return operator


def of_prompt(prompt: str, lengths: list[int]) -> GroupDraft:
    draft = make_draft([1.0] * len(lengths), length=lengths)
    return replace(draft, members=tuple(replace(m, prompt_id=prompt) for m in draft.members))


def test_repeats_in_a_group_are_masked_and_the_first_is_trained() -> None:
    feed = OperatorFeed()
    assert statuses(feed.decide(opened(feed), of_prompt("p", [2, 3, 2, 2]))) == "ttbb"
    assert feed.masked() == {"repeated_in_group": 2}
    dropped = feed.decide(opened(feed, action="drop"), of_prompt("p", [2, 3, 2]))
    assert dropped == ("repeated_in_group", "of 3 members to train: 1 repeated_in_group")
    assert len(list(feed.store().scan())) == 0, "without a window nothing is remembered"


def test_a_window_remembers_what_was_trained_and_forgets_in_order() -> None:
    feed = OperatorFeed()
    operator = opened(feed, window=2)
    assert statuses(feed.decide(operator, of_prompt("p", [2, 3]))) == "tt"
    assert statuses(feed.decide(operator, of_prompt("p", [3, 4]))) == "bt"
    dropped = feed.decide(operator, of_prompt("p", [2, 4]))
    assert dropped == ("repeated_in_window", "of 2 members to train: 2 repeated_in_window")
    assert statuses(feed.decide(operator, of_prompt("other", [2, 3]))) == "tt"
    assert statuses(feed.decide(operator, of_prompt("p", [2, 4]))) == "tb", "the first group has left the window"


def test_a_restart_remembers_the_same_and_a_smaller_window_forgets() -> None:
    feed = OperatorFeed()
    operator = opened(feed, window=4)
    for length in range(1, 9):
        feed.decide(operator, of_prompt("p", [length]))
    assert sum(key.startswith(b"group/") for key, _ in feed.store().scan()) == 4
    assert feed.decide(opened(feed, window=4), of_prompt("p", [5]))[0] == "repeated_in_window"
    assert statuses(feed.decide(opened(feed, window=1), of_prompt("p", [9]))) == "t"
    assert [key[-2:] for key, _ in feed.store().scan(b"group/")] == [b"08"]
    assert statuses(feed.decide(opened(feed, window=1), of_prompt("p", [8]))) == "t"


def test_policies_that_say_the_same_are_not_compared() -> None:
    feed = OperatorFeed()
    operator = opened(feed, window=4)
    draft = of_prompt("p", [2, 3])
    other = replace(draft, members=tuple(replace(m, policy=1) for m in draft.members))
    assert [statuses(feed.decide(operator, d)) for d in (draft, other)] == ["tt", "tt"]


def test_a_group_that_is_dropped_is_not_remembered() -> None:
    feed = OperatorFeed()
    operator = opened(feed, window=4, action="drop")
    feed.decide(operator, of_prompt("p", [2, 2, 3]))
    assert statuses(feed.decide(operator, of_prompt("p", [2, 3]))) == "tt"


def test_members_without_arrays_are_trained_and_counted() -> None:
    feed = OperatorFeed()
    draft = make_draft([1.0, 1.0], sequences=[[], []])
    assert feed.decide(opened(feed, window=2), draft) is draft
    assert feed.metrics.total("members_not_compared") == 2


def test_the_digest_covers_prompt_role_tokens_and_mask() -> None:
    member = make_draft([1.0]).members[0]
    (sequence,) = member.sequences
    others = [
        replace(member, prompt_id="another"),
        replace(member, sequences=[replace(sequence, role="another")]),
        replace(member, sequences=[replace(sequence, tokens=sequence.tokens + 1)]),
        replace(member, sequences=[replace(sequence, mask=1 - sequence.mask)]),
        replace(member, sequences=[sequence, sequence]),
    ]
    assert len({digest_of(m) for m in (member, *others)}) == 6
    assert digest_of(replace(member, replica=7, raw_reward=3.0)) == digest_of(member)
