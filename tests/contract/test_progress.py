"""The launcher's picture of a run while the broker comes and goes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from trainer_feed import local_broker

from headrace.connectors.kafka import Connection
from headrace.pipeline.progress import Follower
from headrace.schemas.config import KafkaConfig
from headrace.schemas.topics import partition_counts


def test_counting_never_keeps_the_launcher_from_starting_the_broker_again(tmp_path: Path) -> None:
    with local_broker(tmp_path) as address:
        connection = Connection.of(KafkaConfig(), "counted", address)
        connection.ensure_topics(partition_counts(["main"], groups=1, inboxes=1, lanes=1))
        producer = connection.producer("worker")
        connection.produce(producer, "trajectories", b"one", partition=0)
        assert producer.flush(10) == 0
        follower = Follower(connection, lambda record: None)
        end = time.monotonic() + 20
        while follower.rollouts != 1 and time.monotonic() < end:
            follower.count(0.0)
            time.sleep(0.05)
        assert follower.rollouts == 1
        answered = time.monotonic() - follower.silence()
    began = time.monotonic()
    follower.count(0.0)
    follower.poll(0.0)
    assert time.monotonic() - began < 1.0
    assert time.monotonic() - follower.silence() == pytest.approx(answered), "nobody has answered since"
    follower.close()
