"""Requests of consumer groups: join, sync, heartbeat, leave, and what tools list."""

from __future__ import annotations

from headrace.connectors.broker.api.call import Call, Later
from headrace.connectors.broker.codes import Code
from headrace.connectors.broker.groups import Group, JoinedMember, JoinRequest, JoinResult, Phase, SyncResult
from headrace.connectors.broker.storage import StorageError
from headrace.connectors.broker.wire import Body, Writer

_NO_OPERATIONS = -(2**31)
_HOST = "/127.0.0.1"


def join_group(call: Call) -> Later:
    """Versions 0 to 5: answered when the members of the new generation are complete."""
    reader, version = call.reader, call.version
    group = reader.string()
    session_ms = reader.int32()
    rebalance_ms = reader.int32() if version >= 1 else session_ms
    member_id = reader.string()
    instance_id = reader.nullable_string() if version >= 5 else None
    protocol_type = reader.string()
    protocols = reader.array(lambda: (reader.string(), bytes(reader.nullable_bytes() or b"")))
    request = JoinRequest(
        group,
        member_id,
        instance_id,
        call.client_id,
        _HOST,
        session_ms,
        rebalance_ms,
        protocol_type,
        protocols,
        version >= 4,
    )
    call.broker.groups.join(request, lambda result: call.reply(_joined(call, result)), call.broker.times.now)
    return Later.PARKED


def _joined(call: Call, result: JoinResult) -> Body:
    out = call.throttled_writer(2)
    out.int16(result.code)
    out.int32(result.generation)
    out.string(result.protocol)
    out.string(result.leader)
    out.string(result.member_id)

    def member(each: JoinedMember) -> None:
        out.string(each.member_id)
        if call.version >= 5:
            out.string(each.instance_id)
        out.blob(each.metadata)

    out.array(result.members, member)
    return out.body()


def sync_group(call: Call) -> Later:
    """Versions 0 to 3: answered when the leader has assigned."""
    reader = call.reader
    group, generation, member_id = reader.string(), reader.int32(), reader.string()
    instance_id = reader.nullable_string() if call.version >= 3 else None
    given = dict(reader.array(lambda: (reader.string(), bytes(reader.nullable_bytes() or b""))))

    def reply(result: SyncResult) -> None:
        out = call.throttled_writer(1)
        out.int16(result.code)
        out.blob(result.assignment)
        call.reply(out.body())

    call.broker.groups.sync(group, generation, member_id, instance_id, given, reply, call.broker.times.now)
    return Later.PARKED


def heartbeat(call: Call) -> Body:
    """Versions 0 to 3."""
    reader = call.reader
    group, generation, member_id = reader.string(), reader.int32(), reader.string()
    instance_id = reader.nullable_string() if call.version >= 3 else None
    code = call.broker.groups.heartbeat(group, generation, member_id, instance_id, call.broker.times.now)
    out = call.throttled_writer(1)
    out.int16(code)
    return out.body()


def leave_group(call: Call) -> Body:
    """Versions 0 to 3; version 3 lets several members go, also by instance id."""
    reader, groups, now = call.reader, call.broker.groups, call.broker.times.now
    group = reader.string()
    out = call.throttled_writer(1)
    if call.version < 3:
        out.int16(groups.leave(group, reader.string(), None, now))
        return out.body()
    leaving = reader.array(lambda: (reader.string(), reader.nullable_string()))
    out.int16(Code.NONE)
    out.length(len(leaving))
    for member_id, instance_id in leaving:
        code = groups.leave(group, member_id, instance_id, now)
        out.string(member_id)
        out.string(instance_id)
        out.int16(code)
    return out.body()


def list_groups(call: Call) -> Body:
    """Versions 0 to 4: groups with members, or with offsets only; version 4 tells and selects by their states."""
    wanted = call.reader.array(call.reader.string) if call.version >= 4 else []
    out = call.throttled_writer(1)
    out.int16(Code.NONE)
    found = dict.fromkeys(call.broker.offsets.groups(), ("", Phase.EMPTY))
    found |= {group.name: (group.protocol_type, group.phase) for group in call.broker.groups.all()}
    listed = {name: about for name, about in found.items() if not wanted or about[1] in wanted}
    out.length(len(listed))
    for name, (protocol_type, phase) in listed.items():
        out.string(name)
        out.string(protocol_type)
        if call.version >= 4:
            out.string(phase)
        out.tags()
    out.tags()
    return out.body()


def describe_groups(call: Call) -> Body:
    """Versions 0 to 4."""
    names = call.reader.array(call.reader.string)
    out = call.throttled_writer(1)
    out.length(len(names))
    for name in names:
        group = call.broker.groups.get(name)
        if group is None:
            group = Group(name, phase=Phase.EMPTY if call.broker.offsets.of(name) else Phase.DEAD)
        _describe(call, out, group)
    return out.body()


def _describe(call: Call, out: Writer, group: Group) -> None:
    out.int16(Code.NONE)
    out.string(group.name)
    out.string(group.phase)
    out.string(group.protocol_type or "consumer")
    out.string(group.protocol)
    out.length(len(group.members))
    for member in group.members.values():
        out.string(member.member_id)
        if call.version >= 4:
            out.string(member.instance_id)
        out.string(member.client_id)
        out.string(member.client_host)
        out.blob(member.metadata(group.protocol))
        out.blob(member.assignment)
    if call.version >= 3:
        out.int32(_NO_OPERATIONS)


def delete_groups(call: Call) -> Body:
    """Versions 0 and 1: groups without members, with their offsets."""
    names = call.reader.array(call.reader.string)
    out = call.writer()
    out.int32(0)
    out.length(len(names))
    for name in names:
        out.string(name)
        out.int16(_delete(call, name))
    return out.body()


def _delete(call: Call, name: str) -> Code:
    group, offsets = call.broker.groups.get(name), call.broker.offsets
    if group is not None and group.members:
        return Code.NON_EMPTY_GROUP
    had_offsets = bool(offsets.of(name))
    try:
        if had_offsets:
            offsets.forget_group(name)
    except StorageError:
        return Code.COORDINATOR_NOT_AVAILABLE
    return Code.NONE if call.broker.groups.delete(name) or had_offsets else Code.GROUP_ID_NOT_FOUND
