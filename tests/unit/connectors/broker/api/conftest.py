"""Fixtures for requests in bytes: a client of a broker in memory with one topic `t` of two partitions."""

from __future__ import annotations

import pytest
from wire_client import WireClient

from headrace.connectors.broker.broker import Broker, BrokerOptions, Times
from headrace.connectors.broker.storage import MemoryStorage


@pytest.fixture
def client(memory: MemoryStorage) -> WireClient:
    """A client without a socket."""
    broker = Broker(memory, BrokerOptions(port=9192, default_partitions=3, first_join_delay=0.0), Times(0.0, 5_000))
    broker.topics.create("t", 2, {})
    return WireClient(broker)
