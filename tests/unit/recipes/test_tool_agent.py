"""The recipe's model is shown conversations exactly as its own template writes them."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from headrace.pipeline import flow
from headrace.schemas.config import load_config

FOLDER = Path(__file__).parents[3] / "recipes" / "tool_agent"


@pytest.fixture(scope="module")
def warm() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "warm_start.py"), run_name="warm_start")


def call(a: int, b: int) -> str:
    arguments = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
    return f"<think>{a} {b}</think>\n\n<tool_call>{arguments}</tool_call>"


def test_demonstrations_are_what_the_template_writes_and_every_token_is_known(warm: dict[str, Any]) -> None:
    tokenizer, rng, seen = warm["make_tokenizer"](), random.Random(0), set[int]()
    tools = [{"type": "function", "function": {"name": "add"}}]
    for _ in range(12):
        shown = warm["demonstration"](rng, 0.0)
        asked = shown[0][0]
        questions = [tuple(map(int, part[-3:].split("+"))) for part in asked.split("?")[:-1]]
        seen.add(len(questions))
        messages: list[dict[str, str]] = []
        for a, b in questions:
            messages += [
                {"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": call(a, b)},
                {"role": "tool", "content": str(a + b)},
                {"role": "assistant", "content": f"<think>{a + b}</think>\n\n{a + b}"},
            ]  # fmt: skip
        replies = [messages[-3]["content"], messages[-1]["content"]]
        assert [said for _, said in shown] == replies
        for number, end in enumerate((-3, -1)):
            text = tokenizer.apply_chat_template(
                messages[:end], tools=tools, tokenize=False, add_generation_prompt=True
            )
            told = "".join(context + said for context, said in shown[:number]) + shown[number][0]
            assert told == text
            ids = tokenizer(text + replies[number], add_special_tokens=False).input_ids
            assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text + replies[number]
    assert seen == {1, 2}, "a conversation ends after one question or two"


def test_labels_are_what_the_model_says_and_nothing_else(warm: dict[str, Any]) -> None:
    tokenizer = warm["make_tokenizer"]()
    ids, labels = warm["batch_of"](random.Random(3), tokenizer, 0.0)
    for row, label in zip(ids, labels, strict=True):
        said = label != -100
        assert (label[said] == row[said]).all()
        text = tokenizer.decode(row[said])
        assert text.startswith("<think>") and text.count("<|im_end|>") == 2 and "<tool_response>" not in text


def test_the_run_can_start() -> None:
    config = load_config([FOLDER / "run.toml"])
    flow.validate(config)
    assert config.policies["main"].depth == 0, "the benchmark compares every log-prob with one version"
