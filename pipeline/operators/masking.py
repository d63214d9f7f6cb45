"""Take members out of training and keep them in the statistics; shared by the operators that judge single members.

In: a draft and the reason for every member that shall not be trained. Out: the draft with those members
``baseline_only``, or a drop under the commonest of the reasons. Each masked member is counted under its reason.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from headrace.pipeline.operators.operator import GroupDraft, OperatorContext

__all__ = ("Action", "mask_or_drop")

Action = Literal["mask", "drop"]
"""``mask``: such a member is ``baseline_only``. ``drop``: one such member ends its group."""


def mask_or_drop(
    record: GroupDraft, reasons: Mapping[int, str], action: Action, operator: str, context: OperatorContext
) -> None:
    """End the group. ``reasons`` are by replica and concern members with status train.

    A group of which nothing would be trained is dropped under either action: it would only take place in a batch.
    """
    trained = record.trained()
    if not reasons and trained:
        context.emit(record)
        return
    counts = Counter(reasons.values())
    if action == "drop" or len(reasons) == len(trained):
        reason = min(counts, key=lambda r: (-counts[r], r), default="nothing_to_train")
        told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        context.drop(reason, f"of {len(trained)} members to train: {told or 'none'}")
        return
    for reason, count in sorted(counts.items()):
        context.metrics.count("members_masked", count, operator=operator, reason=reason)
    members = [replace(m, status="baseline_only") if m.replica in reasons else m for m in record.members]
    context.emit(record.with_members(members))
