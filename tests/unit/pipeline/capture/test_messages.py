"""What a reply is served as, and how a history finds back to what was sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.pipeline.capture.messages import BadRequest, History, answer_of


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_thinking_and_tool_calls_are_taken_apart() -> None:
    said = f"<think>\nhm\n</think>\n\nI look.\n{call('look', {'at': 'ü'})}\n{call('go', {})}"
    made = answer_of(said, "c", tools=True)
    assert made["content"] == "I look." and made["reasoning_content"] == "hm"
    assert [c["function"]["name"] for c in made["tool_calls"]] == ["look", "go"]
    assert json.loads(made["tool_calls"][0]["function"]["arguments"]) == {"at": "ü"}
    assert [c["id"] for c in made["tool_calls"]] == ["c_0", "c_1"]


@pytest.mark.parametrize(
    "block", ["<tool_call>not json</tool_call>", "<tool_call>[1]</tool_call>", call("x", [1]), '<tool_call>{"name": 3}']
)
def test_a_block_that_is_no_call_stays_in_the_content(block: str) -> None:
    made = answer_of(f"see {block}", "c", tools=True)
    assert made == {"role": "assistant", "content": f"see {block}"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["<tool_call>x" + " " * 400_000 + "y", "<tool_call>" * 40_000, "</think>" * 50_000])
def test_long_text_that_is_no_call_is_looked_through_while_the_worker_waits(text: str) -> None:
    assert "tool_calls" not in answer_of(text, "call", tools=True)


def test_without_tools_and_without_an_end_nothing_is_taken_out() -> None:
    assert answer_of(call("look", {}), "c", tools=False) == {"role": "assistant", "content": call("look", {})}
    assert answer_of(call("look", {})[:-12], "c", tools=True)["tool_calls"][0]["function"]["name"] == "look"
    assert answer_of("<think>never ends", "c", tools=True)["content"] == "<think>never ends"


def test_a_served_message_comes_back_as_it_was_sampled() -> None:
    history = History()
    asked: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    content = f"<think>a</think>text {call('look', {'a': 1})}"
    served = answer_of(content, "c7", tools=True)
    history.keep(asked, served, content)
    # a client gives back what it likes of a message: no thinking, content as parts, further keys
    echoed = {"role": "assistant", "content": [{"type": "text", "text": "text"}], "tool_calls": served["tool_calls"],
              "refusal": None, "annotations": []}  # fmt: skip
    tool = {"role": "tool", "tool_call_id": "c7_0", "content": "sunny"}
    assert history.as_sampled([*asked, echoed, tool])[1:] == [{"role": "assistant", "content": content}, tool]
    other = {**echoed, "content": "another"}
    assert history.as_sampled([*asked, other])[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_equal_words_after_different_questions_are_told_apart() -> None:
    history = History()
    for question, thought in (("q1", "one"), ("q2", "two")):
        content = f"<think>{thought}</think>yes"
        history.keep([{"role": "user", "content": question}], answer_of(content, "c", tools=False), content)
    yes = {"role": "assistant", "content": "yes"}
    for question, thought in (("q1", "one"), ("q2", "two"), ("q3", "two")):
        found = history.as_sampled([{"role": "user", "content": question}, yes])[1]["content"]
        assert found == f"<think>{thought}</think>yes", "a shortened history finds the last that said so"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "x"}, "messages.0. has no role"),
        ("x", "messages.0. has no role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "is no text"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "tool_calls"),
    ],
)
def test_messages_that_are_none_are_refused_by_their_place(message: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        History().as_sampled([message])


def test_a_developer_is_a_system() -> None:
    assert History().as_sampled([{"role": "developer", "content": None}]) == [{"role": "system", "content": ""}]
