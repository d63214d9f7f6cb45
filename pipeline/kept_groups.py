"""The groups that ``batch`` holds: open ones by min version, kept ones by value, and a pool of used ones (protocol 4).

Group ids open in rising order, so one number says whether an unknown group is early (its Opened is still to come) or
has ended here before.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.pipeline.lanes import BatchGroup
from headrace.pipeline.operators.serving import Candidate
from headrace.pipeline.runtime.stage import Store
from headrace.pipeline.state import key_of, numbers_of, read_json, scan_json, write_json
from headrace.schemas import codec
from headrace.schemas.records import Group, Member

__all__ = ("KeptGroups",)


@dataclass(frozen=True, slots=True)
class _Pooled:
    """Uses of a pooled group so far, and the numbers that its first and newest use had."""

    uses: int
    entered: int
    last_used: int


class KeptGroups:
    """Open, early, kept and pooled groups of one policy, written through to the store."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        """Min version of groups that are opened and not yet kept."""
        self.kept: dict[int, int] = {}
        """Oldest trained version of groups that may be batched."""
        self.early: dict[int, int] = {}
        """Like ``kept``, of groups whose Opened has not been read."""
        self.pool: dict[int, _Pooled] = {}
        """Batched groups that may be replayed, the longest unused first."""
        self.highest = -1
        """The highest group id whose Opened has been read."""
        self._used = 0
        self._groups: dict[int, Group] = {}
        self._members: dict[int, dict[int, Member]] = {}

    def load(self, store: Store) -> None:
        """Take everything from a store."""
        self.highest = read_json(store, b"highest") if store.get(b"highest") else -1
        for key, version in scan_json(store, "open"):
            self.open[numbers_of(key)[0]] = version
        for _, value in store.scan(b"member/"):
            member = codec.decode(value)
            assert isinstance(member, Member)
            self._members.setdefault(member.group, {})[member.replica] = member
        for key, value in store.scan(b"group/"):
            number = numbers_of(key)[0]
            group = codec.decode(value)
            assert isinstance(group, Group)
            self._groups[number] = group
        pooled = [(_Pooled(*saved), numbers_of(key)[0]) for key, saved in scan_json(store, "pool")]
        self.pool = {group: x for x, group in sorted(pooled, key=lambda p: p[0].last_used)}
        self._used = read_json(store, b"used") or 0
        for number, group in self._groups.items():
            if number not in self.pool:
                (self.kept if number <= self.highest else self.early)[number] = group.oldest_version

    def opened(self, group: int, min_version: int, store: Store) -> bool:
        """Fold an Opened; false when it has been read before."""
        if group <= self.highest:
            return False
        self.highest = group
        write_json(store, b"highest", group)
        if group in self.early:
            self.kept[group] = self.early.pop(group)
        else:
            self.open[group] = min_version
            write_json(store, key_of("open", group), min_version)
        return True

    def expects(self, group: int) -> bool:
        """Whether members and the Group record of this id are wanted."""
        return group in self.open or (group > self.highest and group not in self.early)

    def add_member(self, member: Member, store: Store) -> None:
        """Hold a member until its Group record comes."""
        self._members.setdefault(member.group, {})[member.replica] = member
        store.put(key_of("member", member.group, member.replica), codec.encode(member))

    def add_group(self, group: Group, store: Store) -> None:
        """A Group record: its members are complete; kept when its Opened has been read, else early."""
        number = group.group
        self._groups[number] = group
        store.put(key_of("group", number), codec.encode(group))
        if self.open.pop(number, None) is not None:
            store.delete(key_of("open", number))
            self.kept[number] = group.oldest_version
        else:
            self.early[number] = group.oldest_version

    def candidates(self) -> list[Candidate]:
        """The groups that may be batched, as serving operators see them."""
        return [self.candidate(number) for number in self.kept]

    def pooled(self) -> list[Candidate]:
        """The groups of the pool, the longest unused first."""
        return [
            Candidate(group=self._groups[g], uses=x.uses, entered=x.entered, last_used=x.last_used)
            for g, x in self.pool.items()
        ]

    def candidate(self, number: int) -> Candidate:
        """One held group."""
        return Candidate(group=self._groups[number])

    def take(self, numbers: Iterable[int], store: Store, *, pooled: bool) -> list[BatchGroup]:
        """Remove kept groups for a batch; ``pooled`` ones stay in the pool, used once."""
        taken = []
        for number in numbers:
            del self.kept[number]
            taken.append(self._batch_group(number, 0))
            if pooled:
                self._pool(number, 1, store)
            else:
                self._delete(number, store)
        return taken

    def replay(self, numbers: Iterable[int], store: Store) -> list[BatchGroup]:
        """Groups of the pool with their uses so far; counts one use more."""
        taken = []
        for number in numbers:
            uses = self.pool[number].uses
            taken.append(self._batch_group(number, uses))
            self._pool(number, uses + 1, store)
        return taken

    def trim_pool(self, size: int, oldest_version: int, store: Store) -> None:
        """Forget groups of the pool older than a version, and the first to enter above ``size`` groups."""
        for number in [g for g in self.pool if self._groups[g].oldest_version < oldest_version]:
            self._unpool(number, store)
        surplus = sorted(self.pool, key=lambda g: self.pool[g].entered)[: max(0, len(self.pool) - size)]
        for number in surplus:
            self._unpool(number, store)

    def clear_pool(self, store: Store) -> None:
        """Forget the whole pool."""
        self.trim_pool(0, -1, store)

    def discard(self, number: int, store: Store) -> Group | None:
        """Forget a group that ends untrained; gives its Group record when it was complete."""
        group = self._groups.get(number)
        if self.open.pop(number, None) is not None:
            store.delete(key_of("open", number))
        self.kept.pop(number, None)
        self.early.pop(number, None)
        self._delete(number, store)
        return group

    def _batch_group(self, number: int, use: int) -> BatchGroup:
        members = self._members.get(number, {})
        return BatchGroup(group=self._groups[number], members=tuple(members[r] for r in sorted(members)), use=use)

    def _pool(self, number: int, uses: int, store: Store) -> None:
        before = self.pool.pop(number, None)
        self._used += 1
        x = _Pooled(uses, before.entered if before else self._used, self._used)
        self.pool[number] = x
        write_json(store, key_of("pool", number), (x.uses, x.entered, x.last_used))
        write_json(store, b"used", self._used)

    def _unpool(self, number: int, store: Store) -> None:
        del self.pool[number]
        store.delete(key_of("pool", number))
        self._delete(number, store)

    def _delete(self, number: int, store: Store) -> None:
        for replica in self._members.pop(number, {}):
            store.delete(key_of("member", number, replica))
        if self._groups.pop(number, None) is not None:
            store.delete(key_of("group", number))
