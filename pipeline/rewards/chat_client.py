"""A client of any OpenAI-compatible chat endpoint that a reward may lean on: rate limit, retries, cache, cost.

Goes in: messages; comes out: the reply's text, or JudgeUnavailable once the tries are used up. Thread-safe; equal
requests are asked once, also when they come at the same time.
"""

import hashlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pydantic import Field

from headrace.pipeline.rewards.reward import RewardOptions
from headrace.schemas.errors import HeadraceError

__all__ = ("ChatClient", "ChatOptions", "JudgeUnavailable")

_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_LONGEST_PAUSE = 30.0
_MOST_BYTES = 16 << 20
"""Of an answer."""


_UNUSABLE = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
             RecursionError)  # fmt: skip
"""What a connection, or an answer of another shape than OpenAI's, ends in."""


class JudgeUnavailable(HeadraceError):
    """The endpoint gave no usable answer within its tries."""


class ChatOptions(RewardOptions):
    """Where the judge is and how it may be used."""

    timeout_seconds: float = Field(120.0, gt=0)
    base_url: str
    """Of the endpoint, up to and with ``/v1``."""
    model: str
    """Name that the endpoint knows its model by."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; no key is sent when it is not set."""
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, ge=1)
    requests_per_minute: float = Field(0.0, ge=0)
    """Of one worker; 0: as fast as they come."""
    call_seconds: float = Field(60.0, gt=0)
    """Time for one try."""
    tries: int = Field(4, ge=1)
    """Tries of a request; between them the pause doubles, or is what the endpoint asks for."""
    cache: int = Field(10_000, ge=0)
    """Answers that are remembered."""
    prompt_cost: float = Field(0.0, ge=0)
    """Price of a million prompt tokens."""
    completion_cost: float = Field(0.0, ge=0)
    """Price of a million completion tokens."""


class ChatClient:
    """See the module. ``spent``: requests, tries, cached answers, tokens and cost so far."""

    def __init__(
        self,
        options: ChatOptions,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spent: Counter[str] = Counter()
        self._options = options
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._next = 0.0
        self._answers: OrderedDict[str, Future[str]] = OrderedDict()

    def ask(self, messages: Sequence[dict[str, str]]) -> str:
        """The reply's text. Raises JudgeUnavailable."""
        options = self._options
        body = {"model": options.model, "messages": list(messages), "temperature": options.temperature,
                "max_tokens": options.max_tokens}  # fmt: skip
        raw = json.dumps(body, ensure_ascii=True).encode("ascii")
        key = hashlib.sha256(raw).hexdigest()
        with self._lock:
            known = self._answers.get(key)
            future = known or Future[str]()
            if known is None:
                self._answers[key] = future
                while len(self._answers) > options.cache + 1:
                    self._answers.popitem(last=False)
            else:
                self._answers.move_to_end(key)
                self.spent["judge_cached"] += 1
        if known is not None:
            return known.result()
        problem = "its request broke off"
        try:
            answer = self._asked(raw)
            future.set_result(answer)
        except JudgeUnavailable as error:
            problem = str(error)
            raise
        finally:
            if not future.done():
                future.set_exception(JudgeUnavailable(problem))
            if not options.cache or future.exception() is not None:
                with self._lock:
                    self._answers.pop(key, None)  # a failure is not remembered
        return answer

    def _asked(self, raw: bytes) -> str:
        problem = ""
        self._count("judge_requests", 1)
        for number in range(self._options.tries):
            self._wait_for_turn()
            self._count("judge_tries", 1)
            pause = min(_LONGEST_PAUSE, 0.5 * 2**number)
            try:
                return self._text(self._sent(raw))
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {_said(error)}"
                pause = _retry_after(error.headers.get("Retry-After"), pause)
                if error.code not in _AGAIN:
                    break
            except _UNUSABLE as error:
                problem = f"{type(error).__name__}: {error}"
            if number + 1 < self._options.tries:
                self._sleep(pause)
        raise JudgeUnavailable(f"judge {self._options.model} at {self._options.base_url}: {problem}")

    def _sent(self, raw: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._options.key_env):
            headers["Authorization"] = f"Bearer {key}"
        url = self._options.base_url.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(url, data=raw, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=self._options.call_seconds) as answer:
            found = json.loads(self._body(answer))
        if not isinstance(found, dict):
            raise TypeError(f"the answer is no JSON object: {str(found)[:100]}")
        return found

    def _body(self, answer: Any) -> bytes:
        """All of an answer within the time for one try. Raises TimeoutError, also where it comes drop by drop."""
        end = self._now() + self._options.call_seconds
        body = bytearray()
        while data := answer.read1(1 << 16):
            body += data
            if len(body) > _MOST_BYTES:
                raise ValueError(f"the answer is longer than {_MOST_BYTES} bytes")
            if self._now() > end:
                raise TimeoutError(f"the answer did not end within {self._options.call_seconds:g} s")
        return bytes(body)

    def _text(self, answer: dict[str, Any]) -> str:
        usage = answer.get("usage") or {}
        before, made = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        self._count("judge_tokens", before + made)
        cost = before * self._options.prompt_cost + made * self._options.completion_cost
        self._count("judge_microcost", round(cost))
        return str(answer["choices"][0]["message"]["content"] or "")

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self.spent[name] += amount

    def _wait_for_turn(self) -> None:
        """Requests leave evenly spaced, however many threads ask."""
        if not self._options.requests_per_minute:
            return
        with self._lock:
            turn = max(self._now(), self._next)
            self._next = turn + 60 / self._options.requests_per_minute
        if (pause := turn - self._now()) > 0:
            self._sleep(pause)


def _said(error: urllib.error.HTTPError) -> str:
    """The beginning of what a refusal says; a refusal whose words do not arrive is one all the same."""
    try:
        return error.read(300).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as lost:
        return f"({type(lost).__name__} while it was read)"


def _retry_after(given: str | None, pause: float) -> float:
    try:
        return min(_LONGEST_PAUSE, max(pause, float(given or 0)))
    except ValueError:
        return pause
