"""Topics that are gone are named, but not while a cluster starts or nobody answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.connectors.kafka_errors import BrokerUnreachable, MissingTopic
from headrace.pipeline.runtime import presence as module
from headrace.pipeline.runtime.presence import Presence


def test_a_topic_that_stays_away_is_named_and_one_that_comes_back_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now, have = [100.0], {"steps": 1}
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def ask() -> dict[str, int]:
        if not have:
            raise BrokerUnreachable("nobody answers")
        return have

    connection: Any = SimpleNamespace(bootstrap="k:1", topic=lambda name: f"r.{name}", list_run_topics=ask)
    presence = Presence(connection, ("steps", "ledger"))
    presence.look()
    now[0] += module.GONE_SECONDS - 1
    presence.look()
    have["ledger"] = 1
    now[0] += 5
    presence.look()
    del have["ledger"]
    presence.look()
    have.clear()
    now[0] += 600
    presence.look()
    have["steps"] = 1
    with pytest.raises(MissingTopic, match=r"r\.ledger do not exist on the cluster at k:1; somebody has deleted"):
        presence.look()
