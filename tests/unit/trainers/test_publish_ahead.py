"""A publish beside the next step: the weights may change at once, errors come up where the outcome is needed."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import StoreUnavailable
from headrace.pipeline.delta_to_worker import WeightReader
from headrace.schemas.delta_layout import Layout
from headrace.trainers.publish_ahead import PublishAhead
from headrace.trainers.step_to_delta import DeltaPublisher


class Held(LocalStore):
    """A local store whose puts wait until they are let go, and fail when told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def put(self, key: str, data: Any, *, create_only: bool = False) -> None:
        assert self.gate.wait(20)
        if self.broken:
            raise StoreUnavailable("away")
        super().put(key, data, create_only=create_only)


def ahead(store: LocalStore, weights: dict[str, np.ndarray]) -> PublishAhead:
    return PublishAhead(DeltaPublisher(store, "first", "main", Layout.of(weights, {"w": "bfloat16"})))


def test_weights_may_change_while_they_are_published(tmp_path: Path) -> None:
    store, weights = Held(tmp_path), {"w": np.zeros((40, 8), np.uint16)}
    publisher, reader = ahead(store, weights), WeightReader(store, "first", "main")
    assert publisher.wait() is None
    head = None
    for version in range(4):
        store.gate.clear()
        weights["w"][:] = version
        publisher.start(weights, version=version, lineage=0, batch=version, parent=head)
        weights["w"][:] = 999
        assert reader.head_version() == version - 1
        with pytest.raises(ValueError, match="must wait"):
            publisher.start(weights, version=version + 1, lineage=0, batch=version, parent=head)
        store.gate.set()
        head = publisher.wait()
        assert head is not None
        reader.fetch()
        assert (reader.snapshot().weights["w"] == version).all()
    assert publisher.critical_seconds > 0
    assert publisher.total_seconds > 0


def test_an_error_comes_up_in_wait_and_the_call_can_be_repeated(tmp_path: Path) -> None:
    store, weights = Held(tmp_path), {"w": np.zeros((40, 8), np.uint16)}
    publisher = ahead(store, weights)
    store.broken = True
    publisher.start(weights, version=0, lineage=0, batch=0, parent=None)
    with pytest.raises(StoreUnavailable):
        publisher.wait()
    store.broken = False
    publisher.start(weights, version=0, lineage=0, batch=0, parent=None)
    head = publisher.wait()
    assert head is not None
    assert head.version == 0
