"""Masked members stay in the statistics, are counted by reason, and never leave a group with nothing to train."""

from __future__ import annotations

from operator_feed import OperatorFeed, make_draft, statuses

from headrace.pipeline.operators.masking import Action, mask_or_drop
from headrace.pipeline.operators.operator import GroupDraft


def ended(draft: GroupDraft, reasons: dict[int, str], action: Action, feed: OperatorFeed | None = None) -> object:
    feed = feed or OperatorFeed()
    mask_or_drop(draft, reasons, action, "some", feed)
    (result,) = feed.ended
    return result


def test_masked_members_keep_the_statistics_and_are_counted() -> None:
    draft, feed = make_draft([0.0, 1.0, 1.0, 0.0]), OperatorFeed()
    result = ended(draft, {1: "long", 3: "short"}, "mask", feed)
    assert isinstance(result, GroupDraft) and statuses(result) == "tbtb"
    assert (result.group.reward_mean, result.group.reward_std) == (draft.group.reward_mean, draft.group.reward_std)
    assert (result.group.trained, result.group.counted, result.group.short) == (2, 4, False)
    assert feed.masked() == {"long": 1, "short": 1}


def test_a_group_with_nothing_left_is_dropped_by_its_commonest_reason() -> None:
    feed = OperatorFeed()
    reasons = {0: "short", 1: "long", 2: "long"}
    assert ended(make_draft([0, 1, 1]), reasons, "mask", feed) == ("long", "of 3 members to train: 2 long, 1 short")
    assert ended(make_draft([0, 1]), {0: "b", 1: "a"}, "mask") == ("a", "of 2 members to train: 1 a, 1 b")
    nothing = make_draft([0, 1], status=["excluded", "baseline_only"])
    assert ended(nothing, {}, "mask") == ("nothing_to_train", "of 0 members to train: none")
    assert feed.masked() == {}


def test_action_drop_ends_the_group_for_one_member_and_passes_it_for_none() -> None:
    draft = make_draft([0, 1])
    assert ended(draft, {1: "long"}, "drop") == ("long", "of 2 members to train: 1 long")
    assert ended(draft, {}, "drop") is draft
