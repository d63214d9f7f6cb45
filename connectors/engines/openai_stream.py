"""One request to an endpoint that speaks OpenAI's API, read as it streams.

Goes in: a request; comes out: text and, where the endpoint gives them, ids and log-probs, as far as they have come.
A connection that breaks, and an endpoint that is busy, are tried again from where the stream ended.
"""

import http.client
import json
import random
import socket
import ssl
from contextlib import suppress
from threading import Event, Lock
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from headrace.connectors.engines.engine import Request
from headrace.connectors.model_folder import ModelFolder
from headrace.schemas.errors import HeadraceError

__all__ = ("EndpointRefused", "OpenAIOptions", "Streamed")

_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same request may succeed."""
_LONGEST_PAUSE = 30.0
_LONGEST_LINE = 4 << 20
_LARGEST_ID = 2**31 - 1


class OpenAIOptions(BaseModel):
    """``[rollout.options]`` of the engine ``openai``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern="^https?://")
    """Base address, such as ``http://127.0.0.1:8000/v1``."""
    model: str
    """Name of the model at the endpoint."""
    key_env: str = "OPENAI_API_KEY"
    """Variable with the key that is sent as bearer token; nothing is sent where it is not set."""
    api: Literal["tokens", "text", "chat"] = "tokens"
    """``tokens``: prompts are token ids and vLLM's fields are sent (``/completions``); ``text``: prompts are text and
    no field beyond OpenAI's is sent; ``chat``: the same as one user message (``/chat/completions``)."""
    version: int = Field(-1, ge=-1)
    """The version of the policy that the endpoint serves; -1: another model, and nothing of it is trained."""
    processed_logprobs: bool = False
    """The endpoint's log-probs are those of the distribution that it samples from, at any temperature."""
    context: int = Field(1 << 30, ge=2)
    """Most tokens of prompt plus completion."""
    timeout_seconds: float = Field(120.0, gt=0)
    """Silence after which a connection is given up."""
    retries: int = Field(5, ge=0)
    """Further tries of a request whose connection broke or whose endpoint was busy."""


class EndpointRefused(HeadraceError):
    """The endpoint answered that it will not serve the request. login: it wants another key."""

    def __init__(self, message: str, *, login: bool = False) -> None:
        super().__init__(message)
        self.login = login


class _Again(Exception):
    """Worth another try after ``seconds``."""

    def __init__(self, why: str, seconds: float = 0.0) -> None:
        super().__init__(why)
        self.seconds = seconds


class Streamed:
    """A request with what has come of it; ``run`` is called once, in a thread that may wait."""

    def __init__(self, request: Request, options: OpenAIOptions, folder: ModelFolder, key: str) -> None:
        self.request = request
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.text: list[str] = []
        self.exact = options.api == "tokens"
        """Whether ids and log-probs of all that has come are the endpoint's own."""
        self.end_reason = "abort"
        self.dropped = Event()
        self.over = Event()
        self._options = options
        self._folder = folder
        self._key = key
        self._lock = Lock()
        self._socket: socket.socket | None = None

    def drop(self) -> None:
        """Close the connection: ``run`` returns soon, with the end reason ``abort`` unless it has ended."""
        self.dropped.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Ask until there is an end. Raises EndpointRefused."""
        tried = 0
        while not self.dropped.is_set():
            before = len(self.text)
            try:
                self._ask()
                return
            except (_Again, OSError, http.client.HTTPException) as failure:
                if self.dropped.is_set():
                    return
                tried = 1 if len(self.text) > before else tried + 1
                if tried > self._options.retries:
                    raise EndpointRefused(
                        f"{self._options.url} gave no answer in {tried} tries: {type(failure).__name__}: {failure}"
                    ) from failure
                if not self.exact:  # its place in the text is not known, so it begins anew
                    self.text.clear()
                    self.ids.clear()
                    self.logprobs.clear()
                pause = getattr(failure, "seconds", 0.0) or 0.2 * 2**tried * random.uniform(0.5, 1.5)
                self.dropped.wait(min(_LONGEST_PAUSE, pause))

    def _ask(self) -> None:
        """One connection. Raises _Again, OSError and HTTPException when it may be tried again."""
        at = urlsplit(self._options.url)
        timeout = self._options.timeout_seconds
        connection: http.client.HTTPConnection
        if at.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(at.hostname or "", at.port, timeout=timeout, context=context)
        else:
            connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=timeout)
        try:
            connection.connect()
            with self._lock:
                self._socket = connection.sock
            if self.dropped.is_set():
                return
            path, body = self._body()
            headers = {"content-type": "application/json", "accept": "text/event-stream"}
            if self._key:
                headers["authorization"] = f"Bearer {self._key}"
            connection.request("POST", at.path.rstrip("/") + path, json.dumps(body), headers)
            self._read(connection.getresponse())
        finally:
            with self._lock:
                self._socket = None
            connection.close()

    def _body(self) -> tuple[str, dict[str, Any]]:
        options, sampling, made = self._options, self.request.sampling, self.request.made + len(self.ids)
        body: dict[str, Any] = {
            "model": options.model, "stream": True, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens - made,
        }  # fmt: skip
        if sampling.seed >= 0:
            body["seed"] = sampling.seed + made  # another one where a stream is taken up again
        if options.api != "tokens":
            if sampling.top_k:
                raise EndpointRefused(f"rollout.top_k is no field of OpenAI's API (rollout.options.api {options.api})")
            text = self._folder.detokenize(self.request.prompt)
            if options.api == "text":
                return "/completions", body | {"prompt": text}
            return "/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        # every field that a server would else take from the model's generation_config is given
        body |= {
            "prompt": [*self.request.prompt.tolist(), *self.ids], "logprobs": 0, "return_token_ids": True,
            "top_k": sampling.top_k, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "stop_token_ids": list(self._folder.stop_token_ids), "ignore_eos": True,
            "skip_special_tokens": False,
        }  # fmt: skip
        return "/completions", body

    def _read(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            self._refused(response)
        while line := response.readline(_LONGEST_LINE):
            data = line.strip()
            if not data.startswith(b"data:"):
                continue
            data = data[5:].strip()
            if data == b"[DONE]":
                break
            try:
                self._chunk(json.loads(data))
            except (
                ValueError,
                TypeError,
                KeyError,
                AttributeError,
                IndexError,
                OverflowError,
                RecursionError,
            ) as error:
                raise EndpointRefused(
                    f"{self._options.url} streams what is no OpenAI answer: {data[:200]!r}"
                ) from error
        if self.end_reason == "abort" and self.exact and self.ids:
            whole = len(self.ids) >= self.request.sampling.max_new_tokens - self.request.made
            self.end_reason = "stop" if self.ids[-1] in self._folder.stop_token_ids else "length" if whole else "abort"
        if self.end_reason == "abort" and not self.dropped.is_set():
            raise _Again("the stream ended without a finish_reason")

    def _chunk(self, data: dict[str, Any]) -> None:
        if "error" in data:
            raise _Again(f"the endpoint says in its stream: {str(data['error'])[:300]}")
        for choice in data.get("choices") or ():
            text = choice.get("text") if "text" in choice else (choice.get("delta") or {}).get("content")
            ids = choice.get("token_ids") or []
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
            if not isinstance(text or "", str) or not all(0 <= int(i) <= _LARGEST_ID for i in ids):
                raise ValueError("text that is none, or an id that is none")
            if self.exact and (text or ids or logprobs):
                if len(ids) == len(logprobs) and ids:
                    self.ids += [int(i) for i in ids]
                    self.logprobs += [float(p) for p in logprobs]
                else:
                    self.exact = False
            if text or ids:
                self.text.append(text or "")
            if reason := choice.get("finish_reason"):
                self.end_reason = reason if reason in ("stop", "length") else "stop"
        if self.exact and len(self.ids) > self.request.sampling.max_new_tokens - self.request.made:
            raise ValueError("more tokens than were asked for")

    def said(self) -> str:
        """The text so far; pairs of surrogates are whole again, and half ones become U+FFFD, which can be tokenised."""
        return "".join(self.text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _refused(self, response: http.client.HTTPResponse) -> None:
        said = response.read(2000).decode("utf-8", "replace").strip()
        told = f"{self._options.url} answers HTTP {response.status}: {said[:500] or response.reason}"
        if response.status in (401, 403):
            raise EndpointRefused(f"{told}; is the key in {self._options.key_env or 'no variable'} right?", login=True)
        if response.status in _BUSY:
            after = response.headers.get("retry-after", "")
            raise _Again(told, float(after) if after.replace(".", "", 1).isdigit() else 0.0)
        raise EndpointRefused(f"{told}; check rollout.options (url, model, api)")
