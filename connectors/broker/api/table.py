"""Which requests are served, in which versions, by which handler; and the answer to ApiVersions."""

from __future__ import annotations

from typing import NamedTuple

from headrace.connectors.broker.api import (
    admin,
    fetch,
    group_requests,
    list_offsets,
    metadata,
    offset_requests,
    produce,
    transaction_requests,
)
from headrace.connectors.broker.api.call import Call, Handler
from headrace.connectors.broker.codes import Api, Code
from headrace.connectors.broker.wire import Body, Writer

_NEVER = 1000


class Served(NamedTuple):
    """One kind of request: versions from `low` to `high`, in the flexible encoding from version `flexible` on."""

    handler: Handler
    low: int
    high: int
    flexible: int = _NEVER


def api_versions(call: Call) -> Body:
    """Versions 0 to 3: the table itself."""
    return versions(Code.NONE, call.version)


def versions(code: Code, version: int) -> Body:
    """The body of an ApiVersions response, also for a version that is not served (`code` says so, version 0)."""
    out = Writer(version >= 3)
    out.int16(code)
    out.length(len(TABLE))
    for key, served in TABLE.items():
        out.int16(key)
        out.int16(served.low)
        out.int16(served.high)
        out.tags()
    if version >= 1:
        out.int32(0)
    out.tags()
    return out.body()


TABLE: dict[int, Served] = {
    Api.PRODUCE: Served(produce.produce, 3, 8),
    Api.FETCH: Served(fetch.fetch, 4, 11),
    Api.LIST_OFFSETS: Served(list_offsets.list_offsets, 1, 5),
    Api.METADATA: Served(metadata.metadata, 0, 8),
    Api.OFFSET_COMMIT: Served(offset_requests.offset_commit, 2, 7),
    Api.OFFSET_FETCH: Served(offset_requests.offset_fetch, 1, 7, flexible=6),
    Api.FIND_COORDINATOR: Served(metadata.find_coordinator, 0, 2),
    Api.JOIN_GROUP: Served(group_requests.join_group, 0, 5),
    Api.HEARTBEAT: Served(group_requests.heartbeat, 0, 3),
    Api.LEAVE_GROUP: Served(group_requests.leave_group, 0, 3),
    Api.SYNC_GROUP: Served(group_requests.sync_group, 0, 3),
    Api.DESCRIBE_GROUPS: Served(group_requests.describe_groups, 0, 4),
    Api.LIST_GROUPS: Served(group_requests.list_groups, 0, 4, flexible=3),
    Api.API_VERSIONS: Served(api_versions, 0, 3, flexible=3),
    Api.CREATE_TOPICS: Served(admin.create_topics, 0, 4),
    Api.DELETE_TOPICS: Served(admin.delete_topics, 0, 3),
    Api.DELETE_RECORDS: Served(admin.delete_records, 0, 1),
    Api.INIT_PRODUCER_ID: Served(transaction_requests.init_producer_id, 0, 4, flexible=2),
    Api.ADD_PARTITIONS_TO_TXN: Served(transaction_requests.add_partitions_to_txn, 0, 2),
    Api.ADD_OFFSETS_TO_TXN: Served(transaction_requests.add_offsets_to_txn, 0, 2),
    Api.END_TXN: Served(transaction_requests.end_txn, 0, 2),
    Api.TXN_OFFSET_COMMIT: Served(transaction_requests.txn_offset_commit, 0, 3, flexible=3),
    Api.DESCRIBE_CONFIGS: Served(admin.describe_configs, 0, 3),
    Api.ALTER_CONFIGS: Served(admin.alter_configs, 0, 1),
    Api.CREATE_PARTITIONS: Served(admin.create_partitions, 0, 1),
    Api.DELETE_GROUPS: Served(group_requests.delete_groups, 0, 1),
    Api.INCREMENTAL_ALTER_CONFIGS: Served(admin.incremental_alter_configs, 0, 0),
    Api.OFFSET_DELETE: Served(offset_requests.offset_delete, 0, 0),
}
