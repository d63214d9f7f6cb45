"""One suite for every object store: the local directory and S3 (moto's server in this process)."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.open import open_store
from headrace.connectors.stores.probe import probe_create_only, require_create_only
from headrace.connectors.stores.store import (
    AlreadyExists,
    NoSuchKey,
    ObjectStore,
    StoreRefused,
    StoreUnavailable,
    UnsafeKey,
    exists,
)
from headrace.schemas.config import StoreConfig


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["local", "local-durable", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    if request.param != "s3":
        return LocalStore(tmp_path / "store", durable=request.param == "local-durable")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    endpoint = request.getfixturevalue("endpoint")
    url = f"s3://bucket-{uuid.uuid4().hex[:12]}/some/prefix"
    opened = open_store(StoreConfig(url=url, endpoint_url=endpoint, region="us-east-1"))
    opened.create_bucket()  # type: ignore[attr-defined]
    assert opened.url == url
    return opened


def test_what_is_put_is_got(store: ObjectStore) -> None:
    body = bytes(range(256)) * 40
    store.put("runs/a/x.bin", body)
    assert store.get("runs/a/x.bin") == body
    assert store.head("runs/a/x.bin").size == len(body)
    assert abs(store.head("runs/a/x.bin").modified - time.time()) < 60


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_put_takes_any_buffer(store: ObjectStore, kind: type) -> None:
    store.put("a", kind(b"abc"))
    assert store.get("a") == b"abc"


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert exists(store, "empty")


def test_ranges(store: ObjectStore) -> None:
    store.put("a/b", b"0123456789")
    assert store.get("a/b", 2, 5) == b"234"
    assert store.get("a/b", 7) == b"789"
    assert store.get("a/b", None, 3) == b"012"
    assert store.get("a/b", 8, 100) == b"89"
    assert store.get("a/b", 20, 30) == b""
    assert store.get("a/b", 4, 4) == b""


def test_a_put_replaces(store: ObjectStore) -> None:
    store.put("k", b"one, longer")
    store.put("k", b"two")
    assert store.get("k") == b"two"


def test_create_only_keeps_the_first(store: ObjectStore) -> None:
    store.put("k", b"one", create_only=True)
    with pytest.raises(AlreadyExists, match="k"):
        store.put("k", b"two", create_only=True)
    assert store.get("k") == b"one"


def test_one_of_racing_creators_wins(store: ObjectStore) -> None:
    result = probe_create_only(store, writers=16, rounds=4)
    assert (result.most_winners, result.foreign_bodies) == (1, 0)
    assert require_create_only(store, rounds=2).create_only
    assert list(store.list("probe/")) == []


def test_a_reader_sees_whole_objects_only(store: ObjectStore) -> None:
    bodies = [bytes([n]) * 300_000 for n in range(4)]
    store.put("hot", bodies[0])
    stop = threading.Event()

    def overwrite() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            store.put("hot", bodies[number % 4])

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(overwrite)
        try:
            seen = {store.get("hot") for _ in range(40)}
        finally:
            stop.set()
        writer.result()
    assert seen <= set(bodies)


def test_missing_objects(store: ObjectStore) -> None:
    with pytest.raises(NoSuchKey, match="nowhere"):
        store.get("nowhere/x")
    with pytest.raises(NoSuchKey):
        store.get("nowhere/x", 0, 5)
    with pytest.raises(NoSuchKey):
        store.head("nowhere")
    assert not exists(store, "nowhere")
    store.put("folder/x", b"")
    with pytest.raises(NoSuchKey):
        store.head("folder")


def test_listing_is_sorted_and_can_start_later(store: ObjectStore) -> None:
    keys = [f"runs/r/p/manifest/{v:012d}.json" for v in (10, 2, 9, 100)]
    for key in [*keys, "runs/r/p/delta/2/x/r0.bin", "runs/r/p2/manifest/000000000001.json", "runs/r/p-LATEST"]:
        store.put(key, b"12345")
    found = list(store.list("runs/r/p/manifest/"))
    assert [info.key for info in found] == sorted(keys)
    assert {info.size for info in found} == {5}
    assert [info.key for info in store.list("runs/r/p/manifest/", start_after=sorted(keys)[1])] == sorted(keys)[2:]
    assert {info.key.split("/")[2] for info in store.list("runs/r/p")} == {"p", "p2", "p-LATEST"}
    assert list(store.list("runs/none/")) == []
    everything = [info.key for info in store.list("")]
    assert everything == sorted(everything)
    assert len(everything) == 7


def test_listing_pages(store: ObjectStore) -> None:
    if getattr(store, "_durable", False):
        pytest.skip("a thousand fsyncs show nothing that the other stores do not")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put(f"many/{n:05d}", b""), range(1100)))
    assert sum(1 for _ in store.list("many/")) == 1100


def test_delete_is_idempotent(store: ObjectStore) -> None:
    store.put("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    assert not exists(store, "a/b")
    store.put("a/b", b"y", create_only=True)


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "a/.hidden", "a\\b", "ä", "a" * 901]
)
def test_unsafe_keys_are_refused(store: ObjectStore, key: str) -> None:
    for call in (lambda: store.put(key, b""), lambda: store.get(key), lambda: store.head(key)):
        with pytest.raises(UnsafeKey):
            call()


def test_an_absent_server_is_unavailable_and_an_absent_bucket_is_refused(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    s3 = pytest.importorskip("headrace.connectors.stores.s3")
    away = s3.S3Store("b", endpoint_url="http://127.0.0.1:9", region="us-east-1", timeout=1, attempts=1)
    with pytest.raises(StoreUnavailable, match="s3://b"):
        away.get("x")
    with pytest.raises(StoreUnavailable):
        list(away.list(""))
    with pytest.raises(StoreRefused, match="bucket nobody-made-me"):
        s3.S3Store("nobody-made-me", endpoint_url=endpoint, region="us-east-1").put("x", b"")


def test_settings_that_boto3_refuses_are_refused() -> None:
    s3 = pytest.importorskip("headrace.connectors.stores.s3")
    with pytest.raises(StoreRefused, match="cannot be opened"):
        s3.S3Store("b", endpoint_url="nonsense")
    with pytest.raises(UnsafeKey):
        s3.S3Store("b", "../up")


def test_large_objects_go_up_in_parts(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    s3 = pytest.importorskip("headrace.connectors.stores.s3")
    monkeypatch.setattr(s3, "_MULTIPART_ABOVE", 6 << 20)
    store = s3.S3Store("large", endpoint_url=endpoint, region="us-east-1")
    store.create_bucket()
    body = bytes(range(256)) * (40 << 10)
    store.put("big", body)
    assert store.head("big").size == len(body)
    assert store.get("big", 6 << 20, (6 << 20) + 512) == bytes(range(256)) * 2


def test_what_has_no_key_for_a_name_is_not_listed(store: ObjectStore) -> None:
    for key in ("a/b", "a/c/d"):
        store.put(key, b"x")
    for odd in ("a/copy of b", "a/café", "a/.hidden", f"a/{'x' * 201}"):
        if isinstance(store, LocalStore):
            (store.root / odd).write_bytes(b"x")
        else:
            store._client.put_object(Bucket=store._bucket, Key=f"some/prefix/{odd}", Body=b"x")  # type: ignore[attr-defined]
    assert [info.key for info in store.list("a/")] == ["a/b", "a/c/d"]
