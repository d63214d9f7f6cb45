"""Stores by URL, the local store's own failures, and the probe against stores that break the promise."""

import errno
import resource
import signal
import threading
from pathlib import Path

import pytest

from headrace.connectors.stores import probe
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.open import open_store
from headrace.connectors.stores.probe import probe_create_only, require_create_only
from headrace.connectors.stores.store import AlreadyExists, ObjectStore, StoreRefused, StoreUnavailable, UnsafeKey
from headrace.schemas.config import StoreConfig


def test_paths_and_file_urls_open_local_stores(tmp_path: Path) -> None:
    for where in (tmp_path / "a", str(tmp_path / "a"), (tmp_path / "a").as_uri()):
        store = open_store(where)
        assert isinstance(store, LocalStore)
        assert isinstance(store, ObjectStore)
        assert store.root == tmp_path / "a"


@pytest.mark.parametrize("where", ["http://x/y", "s3:///key", "file://host/x", "gs://b"])
def test_other_urls_are_refused(where: str) -> None:
    with pytest.raises(StoreRefused, match="not understood"):
        open_store(where)


def test_an_empty_url_in_the_settings_is_the_run_folders_store(tmp_path: Path) -> None:
    assert open_store(StoreConfig(url=str(tmp_path / "s"))).url == (tmp_path / "s").as_uri()
    assert open_store(StoreConfig(), tmp_path / "runs" / "r").url == (tmp_path / "runs" / "r" / "store").as_uri()
    with pytest.raises(StoreRefused, match="run folder"):
        open_store(StoreConfig())


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreRefused):
        LocalStore(tmp_path / "file")


def test_a_key_below_an_object_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"")
    with pytest.raises((UnsafeKey, AlreadyExists)):
        store.put("a/b", b"")


def test_a_write_that_fails_half_way_is_retriable_and_leaves_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/k", b"before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StoreUnavailable, match="a/k"):
            store.put("a/k", bytes(4 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.get("a/k") == b"before"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["k"]


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    error = LocalStore(tmp_path)._explained(OSError(errno.ENOSPC, "No space left on device"), "k", "write")
    assert isinstance(error, StoreUnavailable)
    assert "free disk space" in str(error)


def test_an_interrupted_put_is_invisible(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"whole")
    (tmp_path / "a" / ".0123.part").write_bytes(b"ha")
    assert [info.key for info in store.list("")] == ["a/b"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".0123.part", "b"]


class Careless(LocalStore):
    """Looks before it writes: the check and the write are two steps, so racers win together."""

    def __init__(self, root: Path, sleep: threading.Barrier | None = None) -> None:
        super().__init__(root)
        self.meeting = sleep

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        if create_only and self.meeting is None and (self.root / key).exists():
            raise AlreadyExists(key)
        if self.meeting is not None and create_only:
            if (self.root / key).exists():
                raise AlreadyExists(key)
            self.meeting.wait(timeout=30)
        super().put(key, data)


def test_the_probe_finds_a_store_that_lets_racers_win(tmp_path: Path) -> None:
    store = Careless(tmp_path, threading.Barrier(8))
    store.put("late", b"1")
    with pytest.raises(AlreadyExists):
        store.put("late", b"2", create_only=True)
    result = probe_create_only(store, writers=8, rounds=2)
    assert result.most_winners > 1
    assert not result.create_only


def test_the_refusal_says_what_was_seen_and_what_to_do(tmp_path: Path) -> None:
    class Ignores(LocalStore):
        def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
            super().put(key, data)

    with pytest.raises(StoreRefused, match=r"of 16 racing writers up to 16 were told.*versitygw") as caught:
        require_create_only(Ignores(tmp_path), rounds=1)
    assert "If-None-Match" in str(caught.value)


def test_a_store_that_is_away_at_the_start_is_asked_again_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = [2]
    honest = probe.require_create_only

    def require(store: LocalStore) -> None:
        if away[0]:
            away[0] -= 1
            raise StoreUnavailable("connection refused")
        honest(store)

    monkeypatch.setattr(probe, "require_create_only", require)
    monkeypatch.setattr(probe.time, "sleep", lambda seconds: None)
    assert probe.open_for_commits(StoreConfig(), tmp_path)
    assert capsys.readouterr().err.count("waiting for the object store: connection refused") == 2
    away[0] = -1
    with pytest.raises(StoreRefused, match=r"has not answered for 0 s.*connection refused.*endpoint_url"):
        probe.open_for_commits(StoreConfig(patience_seconds=0), tmp_path)


def test_a_store_for_commits_is_probed_unless_told_to_assume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []
    honest = probe.require_create_only
    monkeypatch.setattr(probe, "require_create_only", lambda store: (probed.append(store.url), honest(store)))
    probe.open_for_commits(StoreConfig(conditional_writes="assume"), tmp_path / "a")
    assert probed == []
    store = probe.open_for_commits(StoreConfig(), tmp_path / "b")
    assert probed == [store.url]
    assert list(store.list("")) == []
