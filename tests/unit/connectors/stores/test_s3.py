"""What S3 endpoints answer when something is set up wrongly or half missing: refused in words, or asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.connectors.stores.store import ObjectStore, StoreError, StoreRefused, StoreUnavailable

s3 = pytest.importorskip("headrace.connectors.stores.s3")
pytest.importorskip("boto3")


@dataclass
class Answer:
    """What an endpoint says to everything."""

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    cut: int = 0
    """So many bodies are cut off in the middle."""


def error(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'.encode()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[str, Answer]]:
    answer = Answer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None: ...

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(answer.status)
            for name, value in (*answer.headers, ("Content-Length", str(len(answer.body)))):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: len(answer.body) // 2] if answer.cut else answer.body)
            self.close_connection = answer.cut > 0
            answer.cut = max(0, answer.cut - 1)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answer
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def store(endpoint: tuple[str, Answer]) -> Iterator[ObjectStore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        yield s3.S3Store("bucket", "p", endpoint_url=endpoint[0], region="us-east-1", attempts=1)


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "put": lambda store: store.put("k", b"x", create_only=True),
    "get": lambda store: store.get("k", 0, 5),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list("k/")),
    "delete": lambda store: store.delete("k"),
    "sweep": lambda store: store.sweep_unfinished("k/", 0.0),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", ["PermanentRedirect", "MovedPermanently"])
def test_an_endpoint_that_sends_elsewhere_is_refused(
    endpoint: tuple[str, Answer], store: ObjectStore, call: str, code: str
) -> None:
    """A web server that sends http on to https is the common case."""
    endpoint[1].status, endpoint[1].body = 301, error(code) if code == "PermanentRedirect" else b"<html>moved</html>"
    endpoint[1].headers = (("Location", "https://elsewhere/"),)
    with pytest.raises(StoreRefused, match=r"sends requests elsewhere.*endpoint_url"):
        CALLS[call](store)


@pytest.mark.parametrize("call", [name for name in CALLS if name != "head"])
def test_a_clock_that_is_off_is_named(endpoint: tuple[str, Answer], store: ObjectStore, call: str) -> None:
    endpoint[1].status, endpoint[1].body, endpoint[1].headers = 403, error("RequestTimeTooSkewed"), ()
    with pytest.raises(StoreRefused, match="set this machine's clock"):
        CALLS[call](store)


@pytest.mark.parametrize(("status", "code"), [(404, "NoSuchUpload"), (404, ""), (501, "NotImplemented")])
def test_a_store_that_knows_no_unfinished_uploads_has_none(
    endpoint: tuple[str, Answer], store: ObjectStore, status: int, code: str
) -> None:
    endpoint[1].status, endpoint[1].body, endpoint[1].headers = status, error(code) if code else b"", ()
    assert store.sweep_unfinished("k/", 0.0) == 0


def test_what_a_store_does_not_have_is_not_asked_for_again(endpoint: tuple[str, Answer], store: ObjectStore) -> None:
    endpoint[1].status, endpoint[1].body, endpoint[1].headers = 501, error("NotImplemented"), ()
    with pytest.raises(StoreRefused, match="NotImplemented"):
        store.put("k", b"x", create_only=True)
    endpoint[1].status, endpoint[1].body = 503, error("SlowDown")
    with pytest.raises(StoreUnavailable, match="SlowDown"):
        store.put("k", b"x", create_only=True)


def test_a_bucket_that_cannot_be_is_refused(store: ObjectStore) -> None:
    odd = copy(store)
    odd._bucket = "My Bucket!"  # type: ignore[attr-defined]
    with pytest.raises(StoreRefused, match="Invalid bucket name"):
        odd.get("k")


def test_https_where_http_is_spoken_is_refused(endpoint: tuple[str, Answer], store: ObjectStore) -> None:
    odd = s3.S3Store("b", endpoint_url=endpoint[0].replace("http:", "https:"), region="us-east-1", attempts=1)
    with pytest.raises(StoreRefused, match="speaks http, not https"):
        odd.get("k")


def test_a_page_for_people_is_no_listing(endpoint: tuple[str, Answer], store: ObjectStore) -> None:
    """The address of a store's console in place of its API."""
    endpoint[1].status, endpoint[1].body, endpoint[1].headers = 200, b"<!doctype html><p>Console<br>", ()
    for call in ("list", "put", "delete"):
        with pytest.raises(StoreError):
            CALLS[call](store)


@pytest.mark.parametrize("cut", [0, 2, 3])
def test_a_body_that_is_cut_off_is_asked_for_again_as_often_as_a_request(
    endpoint: tuple[str, Answer], store: ObjectStore, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """Else one broken stream of a large version would have all of it fetched anew."""
    monkeypatch.setattr(s3.time, "sleep", lambda seconds: None)
    three = copy(store)
    three._attempts = 3  # type: ignore[attr-defined]
    endpoint[1].status, endpoint[1].body, endpoint[1].headers, endpoint[1].cut = 200, bytes(range(200)), (), cut
    if cut < 3:
        assert three.get("k") == bytes(range(200))
    else:
        with pytest.raises(StoreUnavailable, match="cannot read k"):
            three.get("k")
    assert endpoint[1].cut == 0
