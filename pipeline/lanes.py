"""From the groups of a batch to the items of its lanes (protocol 2, 8).

Whole groups share a lane, so that a rank sees all members of a group; which one, the operator ``batch`` says. The same
groups always give the same items and digests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.schemas import codec
from headrace.schemas.digests import lane_digest
from headrace.schemas.parts import Lane, ManifestMember
from headrace.schemas.records import Group, Item, Member

__all__ = ("BatchGroup", "EncodedItem", "LaidOut", "lay_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """A group taken into a batch; ``use`` counts the batches that had it before."""

    group: Group
    members: tuple[Member, ...]
    use: int = 0


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item and the bytes that are written and digested."""

    item: Item
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """The items of a batch by lane, and what the Manifest says of them."""

    items: tuple[EncodedItem, ...]
    lanes: tuple[Lane, ...]
    members: tuple[ManifestMember, ...]
    tokens: int
    sequences: int


def lay_out(policy: int, batch: int, groups: Sequence[BatchGroup], lane_of: Sequence[int], lanes: int) -> LaidOut:
    """Lay groups out in ``lanes``, each in the one that ``lane_of`` says.

    Within a lane groups keep the order of ``groups`` and members that of their replicas. Only members with status
    train become items.
    """
    items: list[EncodedItem] = []
    summaries: list[Lane] = []
    members: list[ManifestMember] = []
    for lane in range(lanes):
        here: list[EncodedItem] = []
        for number, taken in enumerate(groups):
            if lane_of[number] != lane:
                continue
            for member in _trained(taken):
                item = _item(member, taken, batch=batch, lane=lane, index=len(here))
                here.append(EncodedItem(item, codec.encode(item)))
                members.append(_manifest_member(item))
        tokens = sum(e.item.length for e in here)
        digest = lane_digest(e.value for e in here)
        summaries.append(Lane(lane=lane, count=len(here), tokens=tokens, digest=digest))
        items += here
    return LaidOut(
        items=tuple(items), lanes=tuple(summaries), members=tuple(members),
        tokens=sum(lane.tokens for lane in summaries),
        sequences=sum(max(1, len(e.item.sequences)) for e in items),
    )  # fmt: skip


def _trained(taken: BatchGroup) -> list[Member]:
    return sorted((m for m in taken.members if m.status == "train"), key=lambda m: m.replica)


def _manifest_member(item: Item) -> ManifestMember:
    return ManifestMember(
        group=item.group, replica=item.replica, use=item.use, lane=item.lane, oldest_version=item.oldest_version
    )


def _item(member: Member, taken: BatchGroup, *, batch: int, lane: int, index: int) -> Item:
    group = taken.group
    return Item(
        policy=member.policy, batch=batch, lane=lane, index=index, use=taken.use, group=member.group,
        replica=member.replica, stream=member.stream, prompt_id=member.prompt_id, raw_reward=member.raw_reward,
        shaped_reward=member.shaped_reward, group_mean=group.reward_mean, group_std=group.reward_std,
        group_count=group.counted, group_roles=group.roles, length=member.length, oldest_version=member.oldest_version,
        newest_version=member.newest_version, end_reason=member.end_reason, rewards=member.rewards,
        sources=member.sources, blob=member.blob, sequences=member.sequences,
    )  # fmt: skip
