"""A small endpoint that speaks OpenAI's streamed completions, honest or broken as a test wants it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789=abcdefghijklmnopqrstuvwxyz ?"]


@dataclass
class Endpoint:
    """Answers each request by the ids ``answer``, one event a token; what it was asked is kept.

    faults: what goes wrong with the next requests, in order: a status to answer with, ``drop`` (the connection breaks
    after two tokens), ``silent`` (an end without a finish_reason), ``garbage``.
    """

    answer: list[int] = field(default_factory=lambda: [5, 6, 7, 2])
    token_ids: bool = True
    pause: float = 0.0
    faults: list[Any] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    cut_off: int = 0
    """Requests whose client went away before the end."""

    def __enter__(self) -> Endpoint:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                endpoint.serve(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["content-length"])))
        self.asked.append(body)
        self.paths.append(request.path)
        self.keys.append(request.headers.get("authorization"))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            request.send_response(fault, "no")
            request.send_header("retry-after", "0.01")
            request.end_headers()
            request.wfile.write(b'{"error": {"message": "told so"}}')
            return
        request.send_response(200)
        request.send_header("content-type", "text/event-stream")
        request.end_headers()
        try:
            self._stream(request, body, fault)
        except (BrokenPipeError, ConnectionResetError):
            self.cut_off += 1

    def _stream(self, request: BaseHTTPRequestHandler, body: dict[str, Any], fault: Any) -> None:
        def tell(text: str) -> None:
            request.wfile.write(f"data: {text}\n\n".encode())
            request.wfile.flush()

        given = body.get("prompt")
        made = len(given) - 3 if isinstance(given, list) else 0  # prompts of the tests have three tokens
        left = self.answer[made:][: body["max_tokens"]]
        for number, token in enumerate(left):
            if fault == "drop" and number == 2:
                request.connection.close()
                return
            if fault == "garbage":
                tell("{not json")
                return
            choice: dict[str, Any] = {"index": 0, "text": WORDS[token] if token > 3 else "", "finish_reason": None}
            if "messages" in body:
                choice = {"index": 0, "delta": {"content": choice["text"]}, "finish_reason": None}
            elif self.token_ids and body.get("return_token_ids"):
                choice |= {"token_ids": [token], "logprobs": {"token_logprobs": [-0.25 * token]}}
            if number == len(left) - 1 and fault != "silent":
                choice["finish_reason"] = "stop" if token == 2 else "length"
            tell(json.dumps({"choices": [choice]}))
            time.sleep(self.pause)
        tell("[DONE]")
