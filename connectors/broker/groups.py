"""The group coordinator: membership of classic consumer groups, generation by generation.

A state machine without clock or sockets: times are seconds of one monotonic clock, and answers that must wait (joins
until the members are complete, syncs until the leader has assigned) go out through the callback of the request. Rules
are those of Apache Kafka: dynamic members get their id first, static members (group.instance.id) come back without a
rebalance and fence an older instance, silent members are evicted after their session.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headrace.connectors.broker.codes import BrokerError, Code

SHORTEST_SESSION_MS = 100
LONGEST_SESSION_MS = 1_800_000


class Phase:
    """States of a group, by Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class JoinRequest(NamedTuple):
    """What a member says when it joins; timeouts in milliseconds, protocols in order of preference."""

    group: str
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_ms: int
    rebalance_ms: int
    protocol_type: str
    protocols: list[tuple[str, bytes]]
    needs_known_id: bool
    """Whether a new dynamic member must first fetch its id (JoinGroup version 4 and later)."""


class JoinedMember(NamedTuple):
    """A member as the leader sees it."""

    member_id: str
    instance_id: str | None
    metadata: bytes


class JoinResult(NamedTuple):
    """Answer to a join; `members` is filled for the leader only."""

    code: Code
    generation: int = -1
    protocol: str = ""
    leader: str = ""
    member_id: str = ""
    members: list[JoinedMember] = []  # noqa: RUF012 (never mutated)


class SyncResult(NamedTuple):
    """Answer to a sync."""

    code: Code
    assignment: bytes = b""


JoinReply = Callable[[JoinResult], None]
SyncReply = Callable[[SyncResult], None]


@dataclass(slots=True)
class Member:
    """One member with its current assignment and, while it waits, the way to answer it."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session: float
    rebalance: float
    protocols: list[tuple[str, bytes]]
    seen: float
    assignment: bytes = b""
    joining: JoinReply | None = None
    syncing: SyncReply | None = None

    def metadata(self, protocol: str) -> bytes:
        """What the member sent for an assignment protocol."""
        return dict(self.protocols).get(protocol, b"")


@dataclass(slots=True)
class Group:
    """One group; `pending` holds ids handed out to members that have not joined with them yet (id to deadline)."""

    name: str
    phase: str = Phase.EMPTY
    generation: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)
    hold_until: float = 0.0
    deadline: float = 0.0

    def selected_protocol(self) -> str:
        """The first preference of the oldest member that all members have, "" when there is none."""
        if not self.members:
            return ""
        common = set.intersection(*({name for name, _ in m.protocols} for m in self.members.values()))
        first = next(iter(self.members.values()))
        return next((name for name, _ in first.protocols if name in common), "")


class Watch(Protocol):
    """Hears of groups that have reached a state worth keeping."""

    def settled(self, group: Group) -> None:
        """A group has a new generation, an assignment, or no members any more; called before members are told."""

    def gone(self, group: Group) -> None:
        """A group was deleted."""


class GroupCoordinator:
    """All groups; `first_delay` seconds are waited for more members when an empty group gets its first.

    `groups` are those of an earlier life (the same dictionary stays in use), `watch` hears of changes.
    """

    def __init__(
        self, first_delay: float = 0.1, groups: dict[str, Group] | None = None, watch: Watch | None = None
    ) -> None:
        self._groups: dict[str, Group] = {} if groups is None else groups
        self._watch = watch
        self._first_delay = first_delay

    def _settled(self, group: Group) -> None:
        if self._watch is not None:
            self._watch.settled(group)

    def get(self, name: str) -> Group | None:
        """A group that has or had members."""
        return self._groups.get(name)

    def all(self) -> Iterable[Group]:
        """Every group that has or had members."""
        return self._groups.values()

    # ---- join

    def join(self, request: JoinRequest, reply: JoinReply, now: float) -> None:
        """A member wants in; `reply` is called once, now or when the rebalance completes."""
        if not request.group:
            return reply(JoinResult(Code.INVALID_GROUP_ID, member_id=request.member_id))
        if not SHORTEST_SESSION_MS <= request.session_ms <= LONGEST_SESSION_MS:
            return reply(JoinResult(Code.INVALID_SESSION_TIMEOUT, member_id=request.member_id))
        group = self._groups.setdefault(request.group, Group(request.group))
        if not self._fits(group, request):
            return reply(JoinResult(Code.INCONSISTENT_GROUP_PROTOCOL, member_id=request.member_id))
        if request.member_id:
            return self._join_known(group, request, reply, now)
        if request.instance_id is not None:
            return self._join_static(group, request, reply, now)
        member_id = f"{request.client_id or 'member'}-{uuid.uuid4()}"
        if request.needs_known_id:
            group.pending[member_id] = now + request.session_ms / 1000
            return reply(JoinResult(Code.MEMBER_ID_REQUIRED, member_id=member_id))
        self._admit(group, member_id, request, reply, now)
        return None

    @staticmethod
    def _fits(group: Group, request: JoinRequest) -> bool:
        if not request.protocol_type or not request.protocols:
            return False
        others = [m for m in group.members.values() if m.member_id != request.member_id]
        if not others:
            return True
        offered = {name for name, _ in request.protocols}
        common = set.intersection(*({name for name, _ in m.protocols} for m in others))
        return group.protocol_type == request.protocol_type and bool(offered & common)

    def _admit(self, group: Group, member_id: str, request: JoinRequest, reply: JoinReply, now: float) -> None:
        group.pending.pop(member_id, None)
        group.protocol_type = request.protocol_type
        if request.instance_id is not None:
            group.instances[request.instance_id] = member_id
        group.members[member_id] = Member(
            member_id,
            request.instance_id,
            request.client_id,
            request.client_host,
            request.session_ms / 1000,
            request.rebalance_ms / 1000,
            request.protocols,
            now,
            joining=reply,
        )
        self._rebalance(group, now)

    def _join_static(self, group: Group, request: JoinRequest, reply: JoinReply, now: float) -> None:
        """A static member without an id: new, or a new process of a known instance, which takes its place."""
        assert request.instance_id is not None
        member_id = f"{request.instance_id}-{uuid.uuid4()}"
        old_id = group.instances.get(request.instance_id)
        if old_id is None:
            return self._admit(group, member_id, request, reply, now)
        member = group.members[old_id]
        self._dismiss(member, Code.FENCED_INSTANCE_ID)
        group.members = {(member_id if key == old_id else key): value for key, value in group.members.items()}
        group.instances[request.instance_id] = member_id
        leader = group.leader
        if leader == old_id:
            group.leader = member_id
        member.member_id = member_id
        self._update(member, request, now)
        if group.phase == Phase.STABLE and group.selected_protocol() == group.protocol:
            self._settled(group)
            # Before version 9 the leader's old id goes out, so that nobody computes an assignment again.
            return reply(JoinResult(Code.NONE, group.generation, group.protocol, leader, member_id))
        member.joining = reply
        self._rebalance(group, now)
        return None

    def _join_known(self, group: Group, request: JoinRequest, reply: JoinReply, now: float) -> None:
        """A member that has its id: first join with it, or a rejoin."""
        if request.member_id in group.pending:
            return self._admit(group, request.member_id, request, reply, now)
        try:
            member = self._member(group, request.member_id, request.instance_id)
        except BrokerError as error:
            return reply(JoinResult(error.code, member_id=request.member_id))
        same = member.protocols == request.protocols
        leads = group.leader == member.member_id
        settled = group.phase == Phase.COMPLETING or (group.phase == Phase.STABLE and not leads)
        self._update(member, request, now)
        if settled and same:
            members = self._listing(group) if leads else []
            return reply(
                JoinResult(Code.NONE, group.generation, group.protocol, group.leader, member.member_id, members)
            )
        member.joining = reply
        self._rebalance(group, now)
        return None

    @staticmethod
    def _update(member: Member, request: JoinRequest, now: float) -> None:
        member.protocols = request.protocols
        member.session = request.session_ms / 1000
        member.rebalance = request.rebalance_ms / 1000
        member.client_id, member.client_host = request.client_id, request.client_host
        member.seen = now

    @staticmethod
    def _dismiss(member: Member, code: Code) -> None:
        """Answer what a member waits for with an error."""
        if member.joining is not None:
            member.joining(JoinResult(code, member_id=member.member_id))
            member.joining = None
        if member.syncing is not None:
            member.syncing(SyncResult(code))
            member.syncing = None

    # ---- rebalance

    def _rebalance(self, group: Group, now: float) -> None:
        if group.phase != Phase.PREPARING:
            first = group.phase == Phase.EMPTY
            group.phase = Phase.PREPARING
            for member in group.members.values():
                if member.syncing is not None:
                    member.syncing(SyncResult(Code.REBALANCE_IN_PROGRESS))
                    member.syncing, member.seen = None, now
            group.hold_until = now + self._first_delay if first else now
            group.deadline = now + max((m.rebalance for m in group.members.values()), default=0.0)
        self._complete_if_ready(group, now)

    def _complete_if_ready(self, group: Group, now: float) -> None:
        if group.phase != Phase.PREPARING or now < group.hold_until:
            return
        everybody = not group.pending and all(m.joining is not None for m in group.members.values())
        if not everybody and now < group.deadline:
            return
        for member in [m for m in group.members.values() if m.joining is None and m.instance_id is None]:
            self._forget(group, member)
        group.generation += 1
        if not group.members:
            self._emptied(group)
            return
        joined = [m for m in group.members.values() if m.joining is not None]
        if not joined:
            group.deadline = now + max(m.rebalance for m in group.members.values())
            return
        group.phase = Phase.COMPLETING
        group.protocol = group.selected_protocol()
        if group.leader not in {m.member_id for m in joined}:
            group.leader = joined[0].member_id
        group.deadline = now + max(m.rebalance for m in group.members.values())
        self._settled(group)
        for member in joined:
            reply, member.joining, member.seen = member.joining, None, now
            assert reply is not None
            members = self._listing(group) if member.member_id == group.leader else []
            reply(JoinResult(Code.NONE, group.generation, group.protocol, group.leader, member.member_id, members))

    @staticmethod
    def _listing(group: Group) -> list[JoinedMember]:
        return [JoinedMember(m.member_id, m.instance_id, m.metadata(group.protocol)) for m in group.members.values()]

    def sync(
        self,
        name: str,
        generation: int,
        member_id: str,
        instance_id: str | None,
        assignments: dict[str, bytes],
        reply: SyncReply,
        now: float,
    ) -> None:
        """A member asks for its assignment; the leader's request brings everybody's."""
        try:
            group, member = self._current(name, generation, member_id, instance_id)
        except BrokerError as error:
            return reply(SyncResult(error.code))
        member.seen = now
        if group.phase == Phase.PREPARING:
            return reply(SyncResult(Code.REBALANCE_IN_PROGRESS))
        if group.phase == Phase.STABLE:
            return reply(SyncResult(Code.NONE, member.assignment))
        member.syncing = reply
        if member_id == group.leader:
            group.phase = Phase.STABLE
            for each in group.members.values():
                each.assignment = assignments.get(each.member_id, b"")
            self._settled(group)
            for each in group.members.values():
                if each.syncing is not None:
                    each.syncing(SyncResult(Code.NONE, each.assignment))
                    each.syncing = None
                    each.seen = now
        return None

    # ---- life signs

    def _member(self, group: Group, member_id: str, instance_id: str | None) -> Member:
        """The member, if the caller is who it says; raises `BrokerError`."""
        if instance_id is not None:
            current = group.instances.get(instance_id)
            if current is not None and current != member_id:
                raise BrokerError(Code.FENCED_INSTANCE_ID, f"{instance_id} was started again elsewhere")
        member = group.members.get(member_id)
        if member is None or (instance_id is not None and member.instance_id != instance_id):
            raise BrokerError(Code.UNKNOWN_MEMBER_ID, f"{member_id} is not in group {group.name}")
        return member

    def _current(self, name: str, generation: int, member_id: str, instance_id: str | None) -> tuple[Group, Member]:
        group = self._groups.get(name)
        if group is None:
            raise BrokerError(Code.UNKNOWN_MEMBER_ID, f"group {name} has no members")
        member = self._member(group, member_id, instance_id)
        if generation != group.generation:
            raise BrokerError(Code.ILLEGAL_GENERATION, f"{name} is at generation {group.generation}")
        return group, member

    def heartbeat(self, name: str, generation: int, member_id: str, instance_id: str | None, now: float) -> Code:
        """A life sign; the answer tells a member to rejoin (REBALANCE_IN_PROGRESS) or that it is out."""
        try:
            group, member = self._current(name, generation, member_id, instance_id)
        except BrokerError as error:
            return error.code
        member.seen = now
        return Code.REBALANCE_IN_PROGRESS if group.phase == Phase.PREPARING else Code.NONE

    def check_commit(
        self,
        name: str,
        generation: int,
        member_id: str,
        instance_id: str | None,
        transactional: bool,
        now: float,
    ) -> None:
        """Whether offsets may be committed by this caller; raises `BrokerError`.

        Outsiders (generation below 0) may commit while the group has no members, and inside a transaction always, as
        old clients send no membership there.
        """
        group = self._groups.get(name)
        anonymous = generation < 0 and not member_id and instance_id is None
        if group is None or not group.members:
            if generation < 0:
                return
            code = Code.UNKNOWN_MEMBER_ID if transactional or group is not None else Code.ILLEGAL_GENERATION
            raise BrokerError(code, f"group {name} has no members")
        if anonymous:
            if transactional:
                return
            raise BrokerError(Code.UNKNOWN_MEMBER_ID, f"group {name} has members, only they may commit")
        _, member = self._current(name, generation, member_id, instance_id)
        if group.phase == Phase.COMPLETING and not transactional:
            raise BrokerError(Code.REBALANCE_IN_PROGRESS, f"group {name} is being assigned")
        member.seen = now

    # ---- leaving

    def leave(self, name: str, member_id: str, instance_id: str | None, now: float) -> Code:
        """A member goes; with an instance id and no member id, whoever holds that instance goes."""
        group = self._groups.get(name)
        if group is None:
            return Code.UNKNOWN_MEMBER_ID
        if group.pending.pop(member_id, None) is not None:
            self._complete_if_ready(group, now)
            return Code.NONE
        if instance_id is not None and not member_id:
            member_id = group.instances.get(instance_id, "")
        try:
            member = self._member(group, member_id, instance_id)
        except BrokerError as error:
            return error.code
        self._evict(group, member, now)
        return Code.NONE

    def _forget(self, group: Group, member: Member) -> None:
        del group.members[member.member_id]
        if member.instance_id is not None and group.instances.get(member.instance_id) == member.member_id:
            del group.instances[member.instance_id]
        self._dismiss(member, Code.UNKNOWN_MEMBER_ID)

    def _evict(self, group: Group, member: Member, now: float) -> None:
        self._forget(group, member)
        if group.members or group.phase == Phase.PREPARING:
            self._rebalance(group, now)
        else:
            group.generation += 1
            self._emptied(group)

    def _emptied(self, group: Group) -> None:
        group.phase, group.leader, group.protocol = Phase.EMPTY, "", ""
        self._settled(group)

    def delete(self, name: str) -> bool:
        """Remove a group without members; false when there is none. Raises `BrokerError` NON_EMPTY_GROUP."""
        group = self._groups.get(name)
        if group is None:
            return False
        if group.members:
            raise BrokerError(Code.NON_EMPTY_GROUP, f"group {name} has {len(group.members)} members")
        del self._groups[name]
        if self._watch is not None:
            self._watch.gone(group)
        return True

    def tick(self, now: float) -> None:
        """Let time pass: evict silent members, give up waiting for those that do not rejoin or assign."""
        for group in self._groups.values():
            if group.pending:
                group.pending = {member_id: until for member_id, until in group.pending.items() if until > now}
            for member in list(group.members.values()):
                waits = member.joining is not None or member.syncing is not None
                if not waits and now - member.seen > member.session:
                    self._evict(group, member, now)
            if group.phase == Phase.COMPLETING and now > group.deadline:
                self._restart(group, now)
            self._complete_if_ready(group, now)

    def _restart(self, group: Group, now: float) -> None:
        """The leader never assigned: drop those that did not ask for an assignment, and start over."""
        for member in [m for m in group.members.values() if m.syncing is None]:
            self._forget(group, member)
        self._rebalance(group, now)
