"""What an admin client makes of a cluster that is slow to settle; its answers are scripted."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from headrace.connectors import cluster_runs, kafka_admin
from headrace.connectors.kafka_admin import answer_of, offsets_at
from headrace.connectors.kafka_errors import KafkaFailure


def answered(result: Any = None, code: int | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    if code is None:
        future.set_result(result)
    else:
        future.set_exception(KafkaException(KafkaError(code)))
    return future


class Admin:
    """Knows the wrong leader until it asks for all of them; its groups load while ``loading`` is above 0."""

    def __init__(self, loading: int = 0) -> None:
        self.renewed = 0
        self.loading = loading

    def list_topics(self, timeout: float) -> None:
        self.renewed += 1

    def list_offsets(self, wanted: Any, **_: Any) -> dict[Any, Future[Any]]:
        code = None if self.renewed else KafkaError.NOT_LEADER_FOR_PARTITION
        return {place: answered(SimpleNamespace(offset=7), code) for place in wanted}

    def list_consumer_groups(self, **_: Any) -> Future[Any]:
        self.loading -= 1
        errors = [KafkaException(KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS))] if self.loading >= 0 else []
        group = SimpleNamespace(group_id="r.batch", state=None)
        return answered(SimpleNamespace(valid=[] if errors else [group], errors=errors))


def test_a_request_that_never_ends_is_an_error_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_admin, "REQUEST_SECONDS", -1.0)
    with pytest.raises(KafkaException) as caught:
        answer_of(Future())
    assert caught.value.args[0].code() == KafkaError._TIMED_OUT


def test_a_partition_that_moved_is_asked_for_where_it_is_now() -> None:
    admin: Any = Admin()
    assert offsets_at(admin, "r", [("steps", 0)], "latest", committed=False) == {("steps", 0): 7}
    assert admin.renewed == 1


def test_groups_that_a_node_still_loads_are_waited_for_and_never_taken_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection: Any = SimpleNamespace(bootstrap="k:1", topic=lambda name: f"r.{name}", admin=lambda: admin)
    admin = Admin(loading=1)
    assert cluster_runs.busy_groups(connection) == ["r.batch"]
    admin = Admin(loading=1 << 30)
    monkeypatch.setattr(cluster_runs, "REQUEST_SECONDS", 0.0)
    with pytest.raises(KafkaFailure, match="COORDINATOR_LOAD_IN_PROGRESS"):
        cluster_runs.busy_groups(connection)
