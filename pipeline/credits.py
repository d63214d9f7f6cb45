"""Credits of a policy: how many groups may be open, which are, and when each of them ends (protocol 3).

A credit opens per (policy, group) and ends exactly once; the first ending record in ledger order counts. The figures
that admission needs (rolling, kept, batched and untrained groups) are kept as counters, so that a decision costs the
same however much is open. Everything written through ``flush`` gives the same view after a restart.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field

from headrace.pipeline.runtime.stage import Store
from headrace.pipeline.state import key_of, numbers_of, pack, read_json, scan_json, unpack, write_json
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Prompt

__all__ = ("KEPT", "LEAST_KEPT_SHARE", "ROLLING", "Credits", "OpenGroup", "PolicyCredits", "fresh_groups", "whole")

ROLLING, KEPT = -2, -1
"""States of a credit; a number >= 0 is the batch that has taken the group."""
LEAST_KEPT_SHARE = 0.25
"""p_min of protocol 3: the least share of kept groups that admission counts on."""


def whole(x: float) -> int:
    """``x`` rounded up, forgiving what floating point adds to a whole number."""
    return math.ceil(x - 1e-9)


def fresh_groups(batch_groups: int, replay: float) -> int:
    """F: fresh groups of a batch of B groups with a replay share (protocol 3).

    >>> fresh_groups(32, 0.3)
    22
    """
    return max(1, round((1 - replay) * batch_groups))


@dataclass(slots=True, kw_only=True)
class PolicyCredits:
    """One policy's versions and counters. ``filtered``: groups are admitted in expectation of drops."""

    index: int
    batch_groups: int
    fresh: int
    depth: float
    extra: int
    lag: int
    filtered: bool
    version: int = 0
    lineage_batch: int = 0
    """Batch of the newest Step or Resumed: batches above it are untrained in the lineage in force."""
    stepped: int = 0
    """The highest batch that any Step or Resumed named; credits up to it have ended."""
    floor: int = 0
    """Version of the last Resumed."""
    kept_share: float = 1.0
    stopped: bool = False
    told_end: bool = False
    rolling: int = 0
    kept: int = 0
    untrained: int = 0
    sizes: dict[int, int] = field(default_factory=dict)

    def room(self) -> tuple[bool, int]:
        """Whether one more group may be admitted, and the cap in force (protocol 3).

        At depth 0 nothing opens while a batch is complete or in training: it would be stale before the next one, and
        take the place of a spare group that is not.
        """
        full = (1 + self.depth) * self.fresh + self.extra
        share, least = (max(self.kept_share, LEAST_KEPT_SHARE), LEAST_KEPT_SHARE) if self.filtered else (1.0, 1.0)
        cap = whole(full / least)
        target = whole(max(0.0, full - self.kept - self.untrained) / share)
        wanted = self.depth > 0 or self.kept + self.untrained < self.fresh
        return wanted and self.rolling < target and self.rolling + self.kept + self.untrained < cap, cap

    def min_version(self) -> int:
        """The oldest version that may sample what is admitted at this moment (protocol 4)."""
        return max(self.floor, self.version - self.lag)

    def outcome(self, kept: bool) -> None:
        """Move the kept share by one group, as a mean over about the last 2 B of them."""
        self.kept_share += (float(kept) - self.kept_share) / (2 * self.batch_groups)

    def batched(self, batch: int, groups: int) -> None:
        """Count a composed batch."""
        if batch not in self.sizes:
            self.sizes[batch] = groups
            if batch > self.lineage_batch:
                self.untrained += groups

    def moved(self, version: int, batch: int, *, resumed: bool) -> bool:
        """Take a Step or Resumed; true when ``batch`` is higher than any before it."""
        self.version, self.lineage_batch = version, batch
        if resumed:
            self.floor = version
        self.untrained = sum(n for k, n in self.sizes.items() if k > batch) if resumed else self._after(batch)
        first = batch > self.stepped
        self.stepped = max(self.stepped, batch)
        return first

    def _after(self, batch: int) -> int:
        total, k = 0, batch + 1
        while k in self.sizes:
            total += self.sizes[k]
            k += 1
        return total


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A group with at least one open credit. ``states`` maps policy to ROLLING, KEPT or a batch number."""

    group: int
    stream: str
    prompt: Prompt
    offset: int
    """Offset of the Prompt in ``prompts``."""
    states: dict[int, int]
    bounds: dict[int, int]
    """Min version per policy of the stream."""
    replicas: int
    retry: int
    issued: int = 0
    """Replicas below this number have been given to a worker at least once."""
    failed: list[int] = field(default_factory=list)
    """Policies for which the group has closed as failed."""
    opened: tuple[int, ...] = ()
    """Policies that a credit was opened for."""
    learned: list[int] = field(default_factory=list)
    """Policies of which operators before rollout know what the group brought."""

    def is_rolling(self) -> bool:
        """True while some policy still waits for the group's trajectories."""
        return ROLLING in self.states.values()


class Credits:
    """All open groups of a run and the credits of all policies."""

    def __init__(self, config: RunConfig, filtered: frozenset[int]) -> None:
        self.policies = [
            PolicyCredits(
                index=i,
                batch_groups=config.trainer_of(name).batch_groups,
                fresh=fresh_groups(config.trainer_of(name).batch_groups, policy.replay),
                depth=policy.depth,
                extra=policy.extra_groups,
                lag=policy.lag,
                filtered=i in filtered and not policy.exact_refill,
                stopped=policy.frozen,
            )
            for i, (name, policy) in enumerate(config.policies.items())
        ]
        self.groups: dict[int, OpenGroup] = {}
        self.next_group = 0
        self.rolling_groups = 0
        self._by_batch: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._dirty: set[int] = set()
        self._touched: set[int] = set()
        self._new_sizes: list[tuple[int, int]] = []

    def load(self, store: Store) -> None:
        """Take the state from a store."""
        self.next_group = read_json(store, b"next-group") or 0
        for p in self.policies:
            saved = read_json(store, key_of("policy", p.index))
            if saved:
                (p.version, p.lineage_batch, p.stepped, p.floor, p.kept_share, p.stopped, p.told_end) = saved
        for key, size in scan_json(store, "size"):
            index, batch = numbers_of(key)
            self.policies[index].batched(batch, size)
        for key, saved in scan_json(store, "group"):
            group = numbers_of(key)[0]
            note, prompt = unpack(store.get(key_of("prompt", group)) or b"")
            assert isinstance(prompt, Prompt)
            x = OpenGroup(
                group=group, stream=note["stream"], prompt=prompt, offset=note["offset"], replicas=note["replicas"],
                bounds={int(p): v for p, v in note["bounds"].items()}, retry=note["retry"], issued=saved["issued"],
                states={int(p): s for p, s in saved["states"].items()}, failed=saved["failed"],
                opened=tuple(note["opened"]), learned=saved["learned"],
            )  # fmt: skip
            self.groups[group] = x
            self.rolling_groups += x.is_rolling()
            for policy, state in x.states.items():
                self._count(policy, state, group, 1)

    def open(self, group: OpenGroup, store: Store) -> None:
        """Add an admitted group; its number must be ``next_group``."""
        self.next_group = group.group + 1
        self.groups[group.group] = group
        self.rolling_groups += 1
        for policy, state in group.states.items():
            self._count(policy, state, group.group, 1)
        note = {
            "stream": group.stream, "offset": group.offset, "replicas": group.replicas, "retry": group.retry,
            "bounds": group.bounds, "opened": group.opened,
        }  # fmt: skip
        store.put(key_of("prompt", group.group), pack(note, group.prompt))
        write_json(store, b"next-group", self.next_group)
        self._dirty.add(group.group)

    def settle(self, group: int, policy: int, state: int) -> OpenGroup | None:
        """Move an open credit to KEPT or into a batch; None when the credit is not open."""
        x = self.groups.get(group)
        if x is None or policy not in x.states:
            return None
        self._set(x, policy, state)
        return x

    def end(self, group: int, policy: int) -> OpenGroup | None:
        """End a credit; None when it is not open. The group is gone once no policy holds it."""
        x = self.groups.get(group)
        if x is None or policy not in x.states:
            return None
        self._set(x, policy, None)
        if not x.states:
            del self.groups[group]
        return x

    def batched(self, policy: int, batch: int, groups: list[int]) -> list[OpenGroup]:
        """Count a Batched record; gives the open groups that it took."""
        p = self.policies[policy]
        if batch not in p.sizes:
            p.batched(batch, len(groups))
            self._new_sizes.append((policy, batch))
        taken = [x for x in (self.settle(g, policy, batch) for g in groups) if x is not None]
        if batch <= p.stepped:
            for x in taken:
                self.end(x.group, policy)
        return taken

    def moved(self, policy: int, version: int, batch: int, *, resumed: bool) -> tuple[bool, list[int]]:
        """Take a Step or Resumed: (first for its batch, groups whose credit it ends)."""
        p = self.policies[policy]
        before = p.stepped
        first = p.moved(version, batch, resumed=resumed)
        self.touch(policy)
        taken = self._by_batch.items()  # a foreign Step may be any number of batches ahead
        ended = sorted(g for (of, k), groups in taken if of == policy and before < k <= p.stepped for g in groups)
        for group in ended:
            self.end(group, policy)
        return first, ended

    def touch(self, policy: int) -> None:
        """Note that a policy's figures have changed."""
        self._touched.add(policy)

    def touch_group(self, group: int) -> None:
        """Note that an open group has changed."""
        self._dirty.add(group)

    def watermark(self) -> int:
        """The greatest W such that all groups <= W have ended (-1: none)."""
        return next(iter(self.groups), self.next_group) - 1

    def flush(self, store: Store) -> None:
        """Write what has changed since the last flush."""
        for group in self._dirty:
            x = self.groups.get(group)
            if x is None:
                store.delete(key_of("group", group))
                store.delete(key_of("prompt", group))
            else:
                saved = {"states": x.states, "issued": x.issued, "failed": x.failed, "learned": x.learned}
                write_json(store, key_of("group", group), saved)
        for index in self._touched:
            p = self.policies[index]
            saved_policy = (p.version, p.lineage_batch, p.stepped, p.floor, p.kept_share, p.stopped, p.told_end)
            write_json(store, key_of("policy", index), saved_policy)
        for index, batch in self._new_sizes:
            write_json(store, key_of("size", index, batch), self.policies[index].sizes[batch])
        self._dirty.clear()
        self._touched.clear()
        self._new_sizes.clear()

    def _set(self, x: OpenGroup, policy: int, state: int | None) -> None:
        was = x.is_rolling()
        self._count(policy, x.states[policy], x.group, -1)
        if state is None:
            del x.states[policy]
        else:
            x.states[policy] = state
            self._count(policy, state, x.group, 1)
        self.rolling_groups += x.is_rolling() - was
        self._dirty.add(x.group)

    def _count(self, policy: int, state: int, group: int, by: int) -> None:
        p = self.policies[policy]
        if state == ROLLING:
            p.rolling += by
        elif state == KEPT:
            p.kept += by
        elif by > 0:
            self._by_batch[policy, state].add(group)
        else:
            rest = self._by_batch[policy, state]
            rest.discard(group)
            if not rest:
                del self._by_batch[policy, state]
