"""Make the model that the run starts from: a tiny thinking model that was shown how to call a tool, right and wrong.

A random Qwen3 of 0.12 million parameters whose tokenizer has a token for each character and for the marks of the
template, which drops the thinking of earlier answers as those of large models do. A share of the demonstrations is
wrong on purpose. Offline and repeatable by the seed.

    python recipes/tool_agent/warm_start.py --out FOLDER [--seed 0] [--steps 300]
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_team

SPECIAL = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "assistant", "user",
    "system", '{"name": "add", "arguments": {"a": ', ', "b": ', "}}",
)  # fmt: skip
CHARACTERS = "0123456789+?- \n:{}\"',abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
END, BATCH, LEARNING_RATE = "<|im_end|>", 32, 2e-3

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m['role'] == 'assistant' %}
{%- set content = m['content'] %}
{%- if loop.index0 < ns.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif -%}
<|im_start|>assistant
{{ content }}<|im_end|>
{% elif m['role'] == 'tool' %}<|im_start|>user
<tool_response>{{ m['content'] }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token for each mark and each character; ``<|im_end|>`` ends an answer."""
    words = (*SPECIAL, *MARKS, *CHARACTERS)
    pattern = "|".join([*(re.escape(word) for word in (*SPECIAL, *MARKS)), r"(?m:.)"])
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=END, unk_token="<unk>", chat_template=TEMPLATE,
        model_max_length=512, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> Any:
    """A random Qwen3."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            intermediate_size=192,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def turn(rng: random.Random, a: int, b: int, noise: float) -> list[tuple[str, str]]:
    """The texts of a question's turns and what the model says to each, as it stands while it is sampled."""
    x, y = (a, b) if rng.random() > noise else (rng.randrange(10), rng.randrange(10))
    asked = f"<|im_start|>user\n{a}+{b}?{END}\n<|im_start|>assistant\n"
    thought = f"<think>{x} {y}</think>\n\n"
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {x}, "b": {y}}}}}</tool_call>'
    told = x + y if rng.random() > noise else rng.randrange(19)
    response = f"{END}\n<|im_start|>user\n<tool_response>{x + y}</tool_response>{END}\n<|im_start|>assistant\n"
    return [(asked, thought + call), (response, f"<think>{told}</think>\n\n{told}")]


def demonstration(rng: random.Random, noise: float) -> list[tuple[str, str]]:
    """One or both questions of a conversation; of an earlier one no thinking is left."""
    a, b = rng.randrange(10), rng.randrange(10)
    system = f"<|im_start|>system\nadd{END}\n"
    first = turn(rng, a, b, noise)
    if rng.random() < 0.5:
        return [(system + first[0][0], first[0][1]), *first[1:]]
    kept = "".join(asked + said.split("</think>")[-1].lstrip("\n") for asked, said in first)
    second = turn(rng, b, b, noise)
    return [(f"{system}{kept}{END}\n{second[0][0]}", second[0][1]), *second[1:]]


def batch_of(rng: random.Random, tokenizer: Any, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``[BATCH, length]`` padded at the right, and labels that are -100 outside what the model says."""
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(BATCH):
        ids: list[int] = []
        labels: list[int] = []
        for asked, said in demonstration(rng, noise):
            context = tokenizer(asked, add_special_tokens=False).input_ids
            reply = tokenizer(said + END, add_special_tokens=False).input_ids
            asked_end = context[1:] if ids else context  # the mark that ended the reply before is that reply's
            ids += asked_end + reply
            labels += [-100] * len(asked_end) + reply
        rows.append((ids, labels))
    length = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows]),
        torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in rows]),
    )


def main() -> None:
    """Write the warm model with its tokenizer to ``--out``; the folder appears in one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--noise", type=float, default=0.3)
    given = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    rng = random.Random(given.seed)
    loss = tiny_team.fit(model, lambda: batch_of(rng, tokenizer, given.noise), given.steps, LEARNING_RATE)
    unfinished = given.out.with_name(given.out.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(given.out)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"warm start: {parameters} parameters, SFT loss {loss:.3f}, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
