"""How commands meet the cluster that they read."""

from __future__ import annotations

import pytest

from headrace.connectors.kafka_errors import BrokerUnreachable
from headrace.connectors.kafka_node import free_port
from headrace.pipeline.cli import reading as module
from headrace.pipeline.cli.reading import reading


def test_an_address_where_nobody_answers_is_said_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEET_SECONDS", 0.3)
    address = f"127.0.0.1:{free_port()}"
    with (
        pytest.raises(BrokerUnreachable, match=rf"answers at {address} within 0\.3 s.*is it started"),
        reading("", "first", address),
    ):
        raise AssertionError("there is no cluster to give")
