"""A schema registry with Confluent's API, as much of it as a run and a deployment need; over the standard library.

In: ``[registry]`` and schemas as JSON data. Out: ids, versions, verdicts. A subject is the record's full name
(``headrace.Prompt``), so that one registration serves every run and topic. Looking up never registers. Works with
Karapace, Apicurio (``/apis/ccompat/v7``) and Confluent's own server.
"""

import base64
import json
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from headrace.schemas.avsc import NAMESPACE
from headrace.schemas.codec import fingerprint_of
from headrace.schemas.config import RegistryConfig
from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.released import incompatibilities

__all__ = (
    "COMPATIBILITY",
    "IncompatibleSchema",
    "Registered",
    "RegistryRefused",
    "RegistryUnreachable",
    "SchemaRegistry",
    "subject_of",
)

COMPATIBILITY = "BACKWARD_TRANSITIVE"
"""A new schema must read everything that any earlier one of its subject wrote."""
_JSON = "application/vnd.schemaregistry.v1+json"
_NOT_FOUND, _CONFLICT = 404, 409
_DENIED = (401, 403)
_BROKEN = 500


class RegistryUnreachable(HeadraceError):
    """No registry answered at the configured address; the message says why and what to do."""


class RegistryRefused(ConfigurationError):
    """The registry refuses a request: a login, or an address that is no registry's."""


class IncompatibleSchema(ConfigurationError):
    """The registry refuses a schema because readers would fail on what was written before."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A schema as the registry holds it."""

    subject: str
    version: int
    number: int
    """The id that stands in front of values."""
    schema: dict[str, Any]


def subject_of(name: str) -> str:
    """The subject of a record: its full name in Avro, the same for every topic and run.

    >>> subject_of("Prompt")
    'headrace.Prompt'
    """
    return f"{NAMESPACE}.{name}"


@dataclass(slots=True)
class SchemaRegistry:
    """One registry. Methods raise RegistryUnreachable, RegistryRefused."""

    config: RegistryConfig
    _tls: ssl.SSLContext | None = field(default=None, repr=False)

    def probe(self) -> int:
        """How many subjects there are; refuses an address that is no registry's, which would only seem empty."""
        found = self._ask("GET", "/subjects")
        if not isinstance(found, list):
            raise RegistryRefused(f"{self.config.url} does not answer as a schema registry does: {str(found)[:200]}")
        return len(found)

    def versions(self, subject: str) -> list[int]:
        """Versions of a subject, oldest first; empty when it does not exist."""
        found = self._ask("GET", f"/subjects/{quote(subject, safe='')}/versions", missing=[])
        return sorted(int(version) for version in found)

    def version(self, subject: str, version: int | str) -> Registered | None:
        """A version of a subject (``latest``: the newest); None when there is none."""
        found = self._ask("GET", f"/subjects/{quote(subject, safe='')}/versions/{version}", missing=None)
        if found is None:
            return None
        return Registered(subject, int(found["version"]), int(found["id"]), json.loads(found["schema"]))

    def find(self, subject: str, schema: dict[str, Any]) -> Registered | None:
        """The newest version that equals ``schema`` but for words in ``doc`` and attributes; None when none does."""
        wanted = fingerprint_of(schema)
        newest = self.version(subject, "latest")
        if newest is None or fingerprint_of(newest.schema) == wanted:
            return newest
        for number in reversed(self.versions(subject)):
            found = self.version(subject, number)
            if found is not None and fingerprint_of(found.schema) == wanted:
                return found
        return None

    def register(self, subject: str, schema: dict[str, Any]) -> int:
        """Add a version and return its id; the same schema again adds none. Raises IncompatibleSchema."""
        body = {"schema": json.dumps(schema), "schemaType": "AVRO"}
        return int(self._ask("POST", f"/subjects/{quote(subject, safe='')}/versions", body)["id"])

    def compatible(self, subject: str, schema: dict[str, Any]) -> list[str]:
        """Why a schema may not be the next version, with the versions that it could not read; empty: it may.

        Each version is compared here too, because the registry's rule for the subject may be laxer than ours.
        """
        body = {"schema": json.dumps(schema), "schemaType": "AVRO"}
        reasons = []
        for version in self.versions(subject):
            held = self.version(subject, version)
            broken = incompatibilities(schema, held.schema) if held is not None else []
            if broken:
                reasons.append(f"version {version}: {'; '.join(broken)}")
                continue
            path = f"/compatibility/subjects/{quote(subject, safe='')}/versions/{version}?verbose=true"
            verdict = self._ask("POST", path, body)
            if not verdict["is_compatible"]:
                said = "; ".join(map(str, verdict.get("messages") or ())) or "no reason given"
                reasons.append(f"version {version}: {said}")
        return reasons

    def compatibility(self, subject: str) -> str:
        """The subject's own rule, empty when it has none and the registry's default holds."""
        found = self._ask("GET", f"/config/{quote(subject, safe='')}", missing={})
        return str(found.get("compatibilityLevel") or found.get("compatibility") or "")

    def set_compatibility(self, subject: str, level: str = COMPATIBILITY) -> None:
        """Give the subject a rule of its own."""
        self._ask("PUT", f"/config/{quote(subject, safe='')}", {"compatibility": level})

    def _ask(self, method: str, path: str, body: object = None, *, missing: Any = ...) -> Any:
        """The answer as JSON; ``missing`` is what a 404 about a subject or version means."""
        reasons = []
        for url in (part.strip().rstrip("/") for part in self.config.url.split(",") if part.strip()):
            if "@" in url:
                raise RegistryRefused(
                    "registry.url holds a login, which messages would print: put it into the environment variables "
                    f"{self.config.username_env} and {self.config.password_env}"
                )
            if not url.startswith(("http://", "https://")):
                raise RegistryRefused(f"registry.url {url!r} is no address: it begins with http:// or https://")
            context = self._context(url)
            try:
                return self._send(method, url + path, body, context)
            except urllib.error.HTTPError as error:
                if error.code < _BROKEN:
                    return self._refused(error, url, path, missing)
                reasons.append(f"{url} answered {error.code} {_said(error)}")
            except (OSError, HTTPException, ValueError) as error:
                reason = getattr(error, "reason", None) or error
                reasons.append(f"{url}: {reason}")
        raise RegistryUnreachable(
            f"no schema registry answers ({'; '.join(reasons) or 'registry.url is empty'}): start it, correct "
            "registry.url, or go without one (registry.url=)"
        )

    def _send(self, method: str, url: str, body: object, context: ssl.SSLContext | None) -> Any:
        headers = {"Accept": f"{_JSON}, application/json", "Content-Type": _JSON, **self._login()}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=self.config.timeout_seconds, context=context) as answer:
            return json.load(answer)

    def _refused(self, error: urllib.error.HTTPError, url: str, path: str, missing: Any) -> Any:
        said = _said(error)
        if error.code == _NOT_FOUND and missing is not ... and "error_code" in said:
            return missing
        if error.code == _CONFLICT:
            raise IncompatibleSchema(f"the registry at {url} refuses {path}: {said}") from error
        hint = ""
        if error.code in _DENIED:
            hint = f"; the login comes from {self.config.username_env} and {self.config.password_env}"
        elif error.code == _NOT_FOUND and missing is ...:
            hint = "; is registry.url the root of Confluent's API (Apicurio: http://HOST:PORT/apis/ccompat/v7)?"
        raise RegistryRefused(f"the registry at {url} answers {error.code} to {path}: {said}{hint}") from error

    def _login(self) -> dict[str, str]:
        user = os.environ.get(self.config.username_env)
        if not user:
            return {}
        pair = f"{user}:{os.environ.get(self.config.password_env, '')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}

    def _context(self, url: str) -> ssl.SSLContext | None:
        if url.startswith("https") and self._tls is None:
            try:
                self._tls = ssl.create_default_context(cafile=self.config.ca_location or None)
            except OSError as error:
                raise RegistryRefused(f"registry.ca_location {self.config.ca_location}: {error}") from error
        return self._tls


def _said(error: urllib.error.HTTPError) -> str:
    return error.read(2000).decode("utf-8", "replace").strip()
