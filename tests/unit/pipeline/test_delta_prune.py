"""Pruning: nothing goes that a kept version needs, whatever lies in the store beside or instead of what was written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import exists
from headrace.pipeline.delta_prune import Pruned, prune
from headrace.pipeline.delta_to_worker import verify_chain
from headrace.schemas.delta_layout import Layout
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.trainers.step_to_delta import DeltaPublisher, Kind


class Kept:
    """Versions of one tensor in a local store."""

    def __init__(self, folder: Path, full_every: int = 4) -> None:
        self.store = LocalStore(folder)
        self.weights = {"w": np.arange(400, dtype=np.uint16)}
        layout = Layout.of(self.weights, {"w": "bfloat16"})
        self.publisher = DeltaPublisher(self.store, "first", "main", layout, full_every)
        self.versions: list[CommittedVersion] = []

    def publish(self, parent: int | None = None, kind: Kind = None) -> None:
        number = len(self.versions)
        self.weights["w"][number] += 1
        base = self.versions[number - 1 if parent is None else parent] if number else None
        self.versions.append(
            self.publisher.publish(self.weights, version=number, lineage=0, batch=number, parent=base, kind=kind)
        )

    def prune(self, **given: object) -> Pruned:
        return prune(self.store, "first", "main", **({"grace_seconds": 0, "orphan_seconds": 0} | given))  # type: ignore[arg-type]

    def problems(self) -> list[str]:
        return [one.problem for one in verify_chain(self.store, "first", "main") if one.problem]


@pytest.mark.parametrize("text", [b"7", b"99", b"000000000007", b"x", b""])
def test_a_mark_of_what_was_pruned_that_lies_deletes_nothing_more(tmp_path: Path, text: bytes) -> None:
    kept = Kept(tmp_path)
    for _ in range(14):
        kept.publish()
    honest = kept.prune(dry=True)
    assert (honest.floor, honest.versions) == (8, tuple(range(8)))
    kept.store.put("runs/first/main/PRUNED", text)
    assert kept.prune(dry=True) == honest
    kept.prune()
    assert kept.problems() == []
    assert kept.prune().objects == 0


def test_what_a_kept_version_of_another_branch_builds_on_stays(tmp_path: Path) -> None:
    kept = Kept(tmp_path, full_every=100)
    for kind in (None, None, "full", None):
        kept.publish(kind=kind)  # type: ignore[arg-type]
    kept.publish(parent=1)  # back to version 1, before the full
    kept.publish()
    kept.publish(kind="full")
    assert kept.prune(checkpoints=[4]).floor == 0
    assert kept.problems() == []
    for kind in (None, "full", None):
        kept.publish(kind=kind)  # type: ignore[arg-type]
    assert kept.prune().floor == 6, "the other branch is left for good"
    assert kept.problems() == []


def test_names_that_nobody_here_gives_hinder_nobody(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for _ in range(9):
        kept.publish()
    for name in ("manifest/a b.json", "manifest/café.json", "delta/copy of 3/x", f"full/{'x' * 201}"):
        path = tmp_path / "runs/first/main" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert kept.prune().floor == 4
    assert kept.problems() == []


@pytest.mark.parametrize(
    ("version", "hours", "stays"), [(9, 0.5, True), (9, 2, False), (10, 0.5, True), (10, 20, True), (10, 30, False)]
)
def test_what_a_slow_upload_has_put_so_far_stays_for_a_day(
    tmp_path: Path, version: int, hours: float, stays: bool
) -> None:
    kept = Kept(tmp_path)
    for _ in range(10):
        kept.publish()
    key = f"runs/first/main/delta/{version}/0-lost/r0.bin"
    kept.store.put(key, b"x")
    then = time.time() - hours * 3600
    os.utime(tmp_path / key, (then, then))
    kept.prune(orphan_seconds=3600.0)
    assert exists(kept.store, key) == stays
