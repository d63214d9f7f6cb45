"""What a publisher refuses to commit: what no reader would accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.connectors.stores.local import LocalStore
from headrace.schemas.delta_layout import Layout, LayoutMismatch
from headrace.trainers.step_to_delta import DeltaPublisher

WEIGHTS = {"w": np.arange(100, dtype=np.uint16)}


@pytest.mark.parametrize("arrays", [{}, {"w": np.zeros((0, 4), np.uint16)}])
def test_a_model_without_weights_is_refused_before_anything_is_written(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    layout = Layout.of(arrays, dict.fromkeys(arrays, "bfloat16"))
    with pytest.raises(LayoutMismatch, match="policy main of run first has no weights"):
        DeltaPublisher(LocalStore(tmp_path), "first", "main", layout)


@pytest.mark.parametrize("name", ["version", "lineage", "batch"])
@pytest.mark.parametrize("number", [10**30, True, 1.0])
def test_numbers_that_no_reader_takes_are_not_committed(tmp_path: Path, name: str, number: Any) -> None:
    publisher = DeltaPublisher(LocalStore(tmp_path), "first", "main", Layout.of(WEIGHTS, {"w": "bfloat16"}))
    numbers: dict[str, Any] = {"version": 0, "lineage": 0, "batch": 0, name: number}
    with pytest.raises(ValueError, match=r"number|contradict"):
        publisher.publish(WEIGHTS, parent=None, **numbers)
    assert publisher.head() is None
    assert publisher.baseline is None
    committed = publisher.publish(WEIGHTS, parent=None, version=0, lineage=0, batch=0)
    assert publisher.head() == committed
