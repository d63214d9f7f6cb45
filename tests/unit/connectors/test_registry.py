"""The registry client against a server that answers as it is told: every kind of answer ends in words or a value."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.connectors.kafka_node import free_port
from headrace.connectors.registry import (
    IncompatibleSchema,
    RegistryRefused,
    RegistryUnreachable,
    SchemaRegistry,
    subject_of,
)
from headrace.connectors.schema_ids import registered_ids
from headrace.schemas.avsc import packaged_schema
from headrace.schemas.codec import fingerprint
from headrace.schemas.config import RegistryConfig


class Scripted:
    """Answers by (method, path); what is not told is a 404 of Confluent's form. Keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {("GET", "/subjects"): (200, [])}
        self.asked: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.asked.append((self.command, self.path, body))
                outer.headers.append(dict(self.headers))
                code, value = outer.answers.get(
                    (self.command, self.path), (404, {"error_code": 40401, "message": "Subject not found."})
                )
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


def registry(url: str, **keys: Any) -> SchemaRegistry:
    return SchemaRegistry(RegistryConfig.model_validate({"url": url, "timeout_seconds": 5.0, **keys}))


def held(server: Scripted, name: str, *schemas: dict[str, Any]) -> None:
    """Let the server hold these versions of a record's schema, with the ids 101, 102, ..."""
    path = f"/subjects/{subject_of(name)}/versions"
    server.answers["GET", path] = (200, list(range(1, len(schemas) + 1)))
    for version, schema in enumerate(schemas, 1):
        answer = {"version": version, "id": 100 + version, "schema": json.dumps(schema), "subject": subject_of(name)}
        server.answers["GET", f"{path}/{version}"] = server.answers["GET", f"{path}/latest"] = (200, answer)


def test_a_schema_is_found_by_its_meaning_newest_first(server: Scripted) -> None:
    schema = packaged_schema("Step")
    reworded = {**schema, "doc": "other words"}
    other = {**schema, "fields": schema["fields"][:-1]}
    held(server, "Step", schema, other)
    found = registry(server.url).find("headrace.Step", schema)
    assert found is not None and (found.version, found.number) == (1, 101)
    held(server, "Step", other, schema, reworded)
    found = registry(server.url).find("headrace.Step", schema)
    assert found is not None and found.number == 103
    assert registry(server.url).find("headrace.Head", packaged_schema("Head")) is None
    assert all(method == "GET" for method, _, _ in server.asked), "looking up wrote something"


def test_ids_of_all_records_or_the_names_of_those_that_are_absent(server: Scripted) -> None:
    held(server, "Step", packaged_schema("Step"))
    held(server, "Head", packaged_schema("Head"))
    found = registered_ids(registry(server.url), ["Step", "Head"])
    assert found == {fingerprint("Step"): 101, fingerprint("Head"): 101}
    with pytest.raises(RegistryRefused, match=r"does not have the schemas of End, Prompt .*headrace schema register"):
        registered_ids(registry(server.url), ["Step", "End", "Prompt"])


def test_registering_sends_the_schema_and_a_refusal_is_told(server: Scripted) -> None:
    path = "/subjects/headrace.Step/versions"
    server.answers["POST", path] = (200, {"id": 7})
    assert registry(server.url).register("headrace.Step", packaged_schema("Step")) == 7
    _, _, body = server.asked[-1]
    assert json.loads(body["schema"]) == packaged_schema("Step")
    server.answers["POST", path] = (409, {"error_code": 409, "message": "READER_FIELD_MISSING_DEFAULT_VALUE"})
    with pytest.raises(IncompatibleSchema, match="READER_FIELD_MISSING_DEFAULT_VALUE"):
        registry(server.url).register("headrace.Step", packaged_schema("Step"))


def test_compatibility_is_asked_of_every_version_and_reasons_are_kept(server: Scripted) -> None:
    schema = packaged_schema("Step")
    less = {**schema, "fields": schema["fields"][1:]}
    held(server, "Step", schema, schema, less)
    path = "/compatibility/subjects/headrace.Step/versions"
    server.answers["POST", f"{path}/1?verbose=true"] = (200, {"is_compatible": False, "messages": ["a rule of ours"]})
    for version in (2, 3):
        server.answers["POST", f"{path}/{version}?verbose=true"] = (200, {"is_compatible": True})
    assert registry(server.url).compatible("headrace.Step", schema) == [
        "version 1: a rule of ours",
        f"version 3: {schema['fields'][0]['name']}: is new and has no default",
    ], "the registry's laxer rule counted"
    assert registry(server.url).compatible("headrace.Head", packaged_schema("Head")) == []


@pytest.mark.parametrize("key", ["compatibilityLevel", "compatibility"])
def test_a_rule_is_read_in_both_spellings(server: Scripted, key: str) -> None:
    assert registry(server.url).compatibility("headrace.Step") == ""
    server.answers["GET", "/config/headrace.Step"] = (200, {key: "FULL"})
    assert registry(server.url).compatibility("headrace.Step") == "FULL"


def test_the_next_address_is_tried_and_all_reasons_are_said(server: Scripted) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    assert registry(f"{dead}, {server.url}/").probe() == 0
    server.answers["GET", "/subjects"] = (503, {"error_code": 50003, "message": "no leader"})
    with pytest.raises(RegistryUnreachable, match=r"refused.*answered 503 .*no leader.*go without one"):
        registry(f"{dead},{server.url}").probe()


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"", b"\xff\xfe", b'{"a": 1}'])
def test_an_answer_that_is_no_registrys_is_an_error_not_an_empty_registry(server: Scripted, body: bytes) -> None:
    server.answers["GET", "/subjects"] = (200, body)
    with pytest.raises((RegistryUnreachable, RegistryRefused)):
        registry(server.url).probe()


def test_the_wrong_path_and_the_wrong_scheme_say_what_is_wanted(server: Scripted) -> None:
    with pytest.raises(RegistryRefused, match=r"the root of Confluent's API \(Apicurio"):
        registry(f"{server.url}/apis").probe()
    with pytest.raises(RegistryRefused, match="begins with http:// or https://"):
        registry("127.0.0.1:8081").probe()
    for url in ("https://me:hidden@127.0.0.1:8081", "me:hidden@127.0.0.1:8081"):
        with pytest.raises(RegistryRefused, match="holds a login") as refused:
            registry(url).probe()
        assert "hidden" not in str(refused.value)


def test_the_login_comes_from_the_environment_and_is_in_no_message(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry(server.url).probe()
    assert "Authorization" not in server.headers[-1]
    monkeypatch.setenv("HEADRACE_REGISTRY_USERNAME", "me")
    monkeypatch.setenv("HEADRACE_REGISTRY_PASSWORD", "s3cret-word")
    registry(server.url).probe()
    assert server.headers[-1]["Authorization"] == f"Basic {base64.b64encode(b'me:s3cret-word').decode()}"
    server.answers["GET", "/subjects"] = (401, {"error_code": 401, "message": "Unauthorized"})
    with pytest.raises(RegistryRefused, match="HEADRACE_REGISTRY_USERNAME") as refused:
        registry(server.url).probe()
    assert "s3cret-word" not in str(refused.value)


def test_a_hung_registry_ends_at_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RegistryUnreachable, match="timed out"):
            registry(url, timeout_seconds=0.2).probe()


def test_certificates_that_cannot_be_read_are_named() -> None:
    with pytest.raises(RegistryRefused, match=r"registry\.ca_location /no/such"):
        registry("https://127.0.0.1:1", ca_location="/no/such").probe()
