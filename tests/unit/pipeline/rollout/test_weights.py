"""The feed of weights: a worker learns when nobody fetches for it any more."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.connectors.stores.local import LocalStore
from headrace.pipeline.rollout.weights import WeightFeed
from headrace.schemas.errors import HeadraceError


class Connection:
    """One whose client cannot be made."""

    run = "r"

    def consumer(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory left")

    def topic(self, name: str) -> str:
        return name


def feed(tmp_path: Path, **more: Any) -> WeightFeed:
    connection: Any = Connection()
    return WeightFeed(LocalStore(tmp_path), connection, ["main"], "w", poll_seconds=0.1, **more)


def test_a_thread_that_has_failed_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    made = feed(tmp_path)
    assert made.take() == [], "it has not begun"
    made.start()
    for _ in range(200):
        if failures:
            break
        time.sleep(0.02)
    made._thread.join(5)
    with pytest.raises(HeadraceError, match="thread that fetches weights has ended"):
        made.take()
    assert "no memory left" in str(failures[0].exc_value)
    made.close()


def test_a_feed_that_was_closed_or_runs_is_asked_as_ever(tmp_path: Path) -> None:
    made = feed(tmp_path, follow=False)
    made.start()
    assert made.take() == []
    made.close()
    assert made.take() == []
