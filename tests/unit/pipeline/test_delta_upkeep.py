"""Rounds of the processes that look after a store: what they say when something is away, and when it is back."""

from __future__ import annotations

import pytest

from headrace.connectors.kafka_errors import BrokerUnreachable
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.store import StoreUnavailable
from headrace.pipeline.delta_upkeep import in_rounds
from headrace.schemas.delta_layout import DeltaError


def test_what_is_back_is_said_once_so_that_nobody_is_told_to_wait_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    stop, rounds = StopSignal(), iter((StoreUnavailable("S"), BrokerUnreachable("B"), DeltaError("D"), None, None))

    def work() -> None:
        trouble = next(rounds, StopIteration)
        if trouble is StopIteration:
            stop.set("the test ends")
        elif isinstance(trouble, Exception):
            raise trouble

    in_rounds(0.0, stop, work)
    said = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "waiting for the object store: S", "waiting for the brokers, nothing is deleted: B",
        "this round was given up: D", "going on",
    ]  # fmt: skip
