"""Chat messages between clients and chat templates: what a reply says, and which message of a history it was.

Goes in: sampled text and messages in the shape of OpenAI's API; comes out: messages with tool calls and thinking apart,
and histories in which every message that was served stands as it was sampled.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ("BadRequest", "History", "answer_of")

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.S)
_THOUGHT = "</think>"


class BadRequest(ValueError):
    """A request that cannot be served as it asks; ``code`` as in OpenAI's errors."""

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.code = code


def answer_of(content: str, call_prefix: str, *, tools: bool) -> dict[str, Any]:
    """The assistant's message that sampled text is served as.

    Thinking up to ``</think>`` becomes ``reasoning_content``. With ``tools``, blocks ``<tool_call>`` of JSON with name
    and arguments become tool calls, numbered behind ``call_prefix``; a block that is none stays in the content.
    """
    thought, found, rest = content.rpartition(_THOUGHT)
    message: dict[str, Any] = {"role": "assistant", "content": rest.strip("\n") if found else content}
    if found:
        message["reasoning_content"] = thought.strip().removeprefix("<think>").strip()
    if not tools:
        return message
    calls: list[dict[str, Any]] = []

    def taken(block: "re.Match[str]") -> str:
        call = _tool_call(block[1].strip())
        if call is None:
            return block[0]
        calls.append({"id": f"{call_prefix}_{len(calls)}", "type": "function", "function": call})
        return ""

    left = _CALL.sub(taken, message["content"]).strip()
    if calls:
        message["content"] = left or None
        message["tool_calls"] = calls
    return message


def _tool_call(text: str) -> dict[str, str] | None:
    try:
        made = json.loads(text)
    except ValueError:
        return None
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        return None
    arguments = made.get("arguments", made.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return {"name": made["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}


@dataclass(slots=True)
class History:
    """The replies served in an episode, by what they followed and by what they said."""

    _exact: dict[str, str] = field(default_factory=dict)
    _said: dict[str, str] = field(default_factory=dict)

    def keep(self, messages: Sequence[Mapping[str, Any]], served: Mapping[str, Any], content: str) -> None:
        """Remember that ``content`` was sampled after ``messages`` and served as ``served``."""
        key = _key(served)
        self._exact[_digest([*map(_key, messages), key])] = content
        self._said[key] = content

    def as_sampled(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages for the chat template: those that were served before as they were sampled, the others as given.

        Raises BadRequest for a message that is no text.
        """
        out: list[dict[str, Any]] = []
        keys: list[str] = []
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise BadRequest(f"messages[{number}] has no role")
            key = _key(message)
            keys.append(key)
            sampled = None
            if message["role"] == "assistant":
                sampled = self._exact.get(_digest(keys), self._said.get(key))
            out.append({"role": "assistant", "content": sampled} if sampled is not None else _plain(message, number))
        return out


def _plain(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message as chat templates take it: text content, arguments of tool calls as objects."""
    out = {k: v for k, v in message.items() if v is not None and k not in ("content", "reasoning_content", "refusal")}
    if out["role"] == "developer":
        out["role"] = "system"
    out["content"] = _text(message.get("content"), number)
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_with_object(call, number) for call in calls]
    return out


def _with_object(call: Any, number: int) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return {**call, "function": {**function, "arguments": arguments}}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadRequest(f"messages[{number}].tool_calls: {error!r} in {str(call)[:100]}") from None


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadRequest(f"messages[{number}].content is no text: images and other parts are not served", "unsupported")


def _key(message: Mapping[str, Any]) -> str:
    """What of a message a client gives back unchanged."""
    calls = message.get("tool_calls") or ()
    told = [
        [c.get("id"), f.get("name"), f.get("arguments")]
        for c in calls
        if isinstance(c, Mapping) and isinstance(f := c.get("function"), Mapping)
    ]
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
    return json.dumps([message.get("role"), content or "", told, message.get("tool_call_id")], default=str)


def _digest(keys: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(keys).encode("utf-8", "surrogatepass")).hexdigest()
