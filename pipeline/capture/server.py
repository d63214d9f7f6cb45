"""The capture endpoint: OpenAI's API on an address of the worker, one secret base URL for each episode.

Goes in: an episode; comes out: its base URL, valid until the episode is closed. A program that knows nothing of this
project is told that URL in OPENAI_BASE_URL, and what it samples becomes the episode's trajectory.
"""

import json
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from headrace.connectors.engines.engine import PromptTooLong
from headrace.pipeline.capture.episode import CapturedEpisode
from headrace.pipeline.capture.http import Answer, HttpServer, Request
from headrace.pipeline.capture.messages import BadRequest
from headrace.pipeline.workflows.workflow import EpisodeFailed

__all__ = ("CaptureServer",)


class CaptureServer:
    """One server of a worker; ``start`` before the first ``open``."""

    def __init__(self) -> None:
        self._http = HttpServer(self._handle)
        self._episodes: dict[str, CapturedEpisode] = {}
        self._host, self._port = "127.0.0.1", 0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on an address; port 0 takes a free one."""
        self._host, self._port = host, await self._http.start(host, port)

    def open(self, episode: CapturedEpisode) -> tuple[str, str]:
        """Serve an episode: its base URL and its key, which the URL holds already and any client may send as well."""
        key = secrets.token_urlsafe(18)
        self._episodes[key] = episode
        return f"http://{self._host}:{self._port}/{key}/v1", key

    def close_episode(self, key: str) -> None:
        """Refuse further requests of an episode."""
        self._episodes.pop(key, None)

    async def close(self) -> None:
        """Stop listening and end what runs."""
        await self._http.close()

    async def _handle(self, request: Request) -> Answer:
        key, _, path = request.path.split("?")[0].lstrip("/").partition("/")
        episode = self._episodes.get(key)
        if episode is None:
            return _error(404, "no such episode, or it has ended; the base URL is that of one episode", "not_found")
        path = path.removeprefix("v1/").rstrip("/")
        if path == "models" and request.method == "GET":
            return Answer(200, episode.models())
        if path not in ("chat/completions", "completions"):
            return _error(404, f"/{path} is not served; chat/completions, completions and models are", "not_found")
        if request.method != "POST":
            return _error(405, f"{request.method} is not served here", "method_not_allowed")
        return await self._call(episode, path, request.body)

    async def _call(self, episode: CapturedEpisode, path: str, raw: bytes) -> Answer:
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise BadRequest("the body must be a JSON object")
            answer = await (episode.chat(body) if path == "chat/completions" else episode.complete(body))
        except BadRequest as error:
            return _error(400, str(error), error.code)
        except PromptTooLong as error:
            return _error(400, str(error), "context_length_exceeded")
        except EpisodeFailed as error:
            return _error(500, str(error), "generation_failed")
        except (ValueError, RecursionError) as error:
            return _error(400, f"the request cannot be used: {error}", "invalid_request_error")
        except Exception as error:  # the seam to clients: what a request breaks is answered to whoever sent it
            sys.stderr.write(f"capture: {path} failed: {type(error).__name__}: {str(error)!a}\n")
            return _error(500, f"{type(error).__name__}: {error}", "internal_error")
        return Answer(200, events=_chunks(answer, body)) if body.get("stream") else Answer(200, answer)


def _error(status: int, message: str, code: str) -> Answer:
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = message.encode("utf-8", "backslashreplace").decode()
    return Answer(status, {"error": {"message": said, "type": kind, "param": None, "code": code}})


def _chunks(answer: Mapping[str, Any], body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A whole answer as the events of a stream: each choice at once, then its end, then the usage if asked for."""
    chat = answer["object"] == "chat.completion"
    head = {k: answer[k] for k in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else answer["object"]
    out: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        index, end = choice["index"], choice["finish_reason"]
        if not chat:
            out.append({**head, "choices": [choice]})
            continue
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        first = {"index": index, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
        out.append({**head, "choices": [first]})
        out.append({**head, "choices": [{"index": index, "delta": {}, "finish_reason": end, "logprobs": None}]})
    options = body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        out.append({**head, "choices": [], "usage": answer["usage"]})
    return out
