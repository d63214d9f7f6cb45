"""One episode behind the capture endpoint: requests in the shape of OpenAI's API, answered by the task's policies.

Goes in: bodies of ``/chat/completions`` and ``/completions``; comes out: their answers, and at the end the sequences of
all that was sampled. What would change the sampled distribution unseen is refused by name.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from headrace.connectors.engines.engine import unusable
from headrace.pipeline.capture.messages import BadRequest, History, answer_of
from headrace.pipeline.capture.transcript import Context, Reply, Transcript
from headrace.pipeline.workflows.workflow import PolicySession
from headrace.schemas import parts
from headrace.schemas.parts import Sampling

__all__ = ("CapturedEpisode", "SamplingRule")

SamplingRule = Literal["task", "client"]

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "min_p": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}
"""Fields that are served at these values only: others change what is sampled, and nobody would see it in the data."""
_MOST_CHOICES = 16
_LARGEST_ID = 2**31 - 1


class CapturedEpisode:
    """See the module. sampling: the task's; rule: whose temperature, top_p and top_k are in force."""

    def __init__(self, sessions: Mapping[int, PolicySession], sampling: Sampling, rule: SamplingRule = "task") -> None:
        several = len(sessions) > 1
        self._sampling = sampling
        self._rule = rule
        self._sessions = dict(sessions)
        self._transcripts = {
            p: Transcript(s, sampling, f"policy{p}" if several else "policy") for p, s in sessions.items()
        }
        self._histories = {p: History() for p in sessions}
        self.last: Reply | None = None
        """The reply that was sampled last."""
        self.last_text = ""
        """What it was served as."""

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a chat request. Raises BadRequest, PromptTooLong and EpisodeFailed."""
        policy = self._policy(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages must be a list of at least one")
        history, session = self._histories[policy], self._sessions[policy]
        tools = () if body.get("tool_choice") == "none" else _tools(body)
        try:
            text = session.render(history.as_sampled(messages), tools, _settings(body))
        except BadRequest:
            raise
        except ValueError as error:
            raise BadRequest(str(error)) from error
        replies = await self._sample(policy, body, lambda: self._transcripts[policy].context(text))
        answer = self._head("chatcmpl", "chat.completion", body, replies)
        for number, reply in enumerate(replies):
            content = _before_stop(reply.content, _stops(body))
            served = answer_of(content, f"call_{uuid.uuid4().hex[:12]}", tools=bool(tools))
            history.keep(messages, served, reply.content)
            self.last_text = served["content"] or ""
            reason = "tool_calls" if "tool_calls" in served else _finish(reply)
            answer["choices"].append(
                {
                    "index": number,
                    "message": served,
                    "finish_reason": reason,
                    "logprobs": _logprobs(session, reply, body),
                }
            )
        return answer

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request of ``/completions``, whose prompt is text or token ids."""
        policy = self._policy(body)
        prompt, transcript = body.get("prompt"), self._transcripts[policy]
        if isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt):
            if not all(0 <= i <= _LARGEST_ID for i in prompt):
                raise BadRequest("prompt holds what is no token id")
            replies = await self._sample(policy, body, lambda: transcript.context_of_ids(np.array(prompt, np.int32)))
        elif isinstance(prompt, str) and prompt:
            replies = await self._sample(policy, body, lambda: transcript.context(prompt))
        else:
            raise BadRequest("prompt must be a text or a list of token ids")
        answer = self._head("cmpl", "text_completion", body, replies)
        for number, reply in enumerate(replies):
            self.last_text = _before_stop(reply.text, _stops(body))
            choice = {"index": number, "text": self.last_text, "finish_reason": _finish(reply), "logprobs": None}
            if body.get("return_token_ids"):
                choice["token_ids"] = reply.ids.tolist()
            answer["choices"].append(choice)
        return answer

    def sequences(self) -> list[parts.Sequence]:
        """All that was sampled, policy by policy."""
        return [sequence for transcript in self._transcripts.values() for sequence in transcript.sequences()]

    @property
    def calls(self) -> int:
        """Calls that ended."""
        return sum(transcript.calls for transcript in self._transcripts.values())

    def models(self) -> dict[str, Any]:
        """The answer of ``/models``."""
        names = [f"policy{p}" for p in self._sessions]
        return {"object": "list", "data": [{"id": n, "object": "model", "owned_by": "headrace"} for n in names]}

    def _policy(self, body: Mapping[str, Any]) -> int:
        """The policy that a request names: ``policy1``, or the first for any other name."""
        name = str(body.get("model", ""))
        number = name.removeprefix("policy")
        found = int(number) if number.isdecimal() else -1
        return found if found in self._sessions else next(iter(self._sessions))

    async def _sample(self, policy: int, body: Mapping[str, Any], context: Callable[[], Context]) -> list[Reply]:
        _refuse(body)
        sampling, stop = self._effective(body), _stops(body)
        count = _count(body, "n", 1, _MOST_CHOICES)
        transcript = self._transcripts[policy]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(transcript.sample(context(), sampling, stop)) for _ in range(count)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self.last = tasks[-1].result()
        return [task.result() for task in tasks]

    def _effective(self, body: Mapping[str, Any]) -> Sampling:
        most = self._sampling.max_new_tokens
        wanted = _given(body, "max_completion_tokens", _given(body, "max_tokens", most))
        if not isinstance(wanted, int) or wanted < 1:
            raise BadRequest(f"max_tokens is {wanted!r}: it must be a number of at least 1")
        effective = replace(self._sampling, max_new_tokens=min(most, wanted))
        if self._rule == "task":
            return effective
        try:
            asked = replace(
                effective,
                temperature=float(_given(body, "temperature", 1.0)),
                top_p=float(_given(body, "top_p", 1.0)),
                top_k=max(0, int(_given(body, "top_k", 0))),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRequest(f"temperature, top_p and top_k must be numbers: {error}") from error
        if problem := unusable(asked):
            raise BadRequest(problem)
        return asked

    def _head(self, kind: str, what: str, body: Mapping[str, Any], replies: list[Reply]) -> dict[str, Any]:
        before, made = replies[0].prompt_tokens, sum(r.ids.size for r in replies)
        usage = {"prompt_tokens": before, "completion_tokens": int(made), "total_tokens": int(before + made)}
        return {
            "id": f"{kind}-{uuid.uuid4().hex}", "object": what, "created": int(time.time()),
            "model": str(body.get("model", "policy")), "choices": [], "usage": usage,
        }  # fmt: skip


def _logprobs(session: PolicySession, reply: Reply, body: Mapping[str, Any]) -> dict[str, Any] | None:
    if not body.get("logprobs"):
        return None
    content = []
    for token, logprob in zip(reply.ids, reply.logprobs, strict=True):
        text = session.detokenize(np.array([token], np.int32))
        content.append({"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def _tools(body: Mapping[str, Any]) -> list[Any]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools
    ):
        raise BadRequest('tools must be a list of {"type": "function", "function": {...}}')
    return tools


def _settings(body: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = body.get("chat_template_kwargs") or {}
    if not isinstance(settings, dict):
        raise BadRequest("chat_template_kwargs must be an object")
    return settings


def _refuse(body: Mapping[str, Any]) -> None:
    """Raise BadRequest for a field that would change the distribution, or that asks for what is not recorded."""
    for name, allowed in _NEUTRAL.items():
        if (value := body.get(name)) is not None and value not in allowed:
            raise BadRequest(
                f"{name} = {str(value)[:80]} would change what is sampled, and its tokens could not be trained: leave "
                "it out",
                "unsupported_parameter",
            )


def _stops(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop") or []
    found = [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(isinstance(s, str) for s in found):
        raise BadRequest("stop must be a text or a list of texts")
    return found


def _before_stop(text: str, stops: list[str]) -> str:
    """A text up to the first stop text, as clients expect it."""
    at = min((text.find(s) for s in stops if s and s in text), default=-1)
    return text if at < 0 else text[:at]


def _count(body: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = body.get(name) or least
    if not isinstance(value, int) or not least <= value <= most:
        raise BadRequest(f"{name} is {value!r}: it must be from {least} to {most}")
    return value


def _given(body: Mapping[str, Any], name: str, default: float) -> Any:
    value = body.get(name)
    return default if value is None else value


def _finish(reply: Reply) -> str:
    return "stop" if reply.end_reason == "stop" else "length"
