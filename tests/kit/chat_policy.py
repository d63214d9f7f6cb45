"""A policy for tests of agents: a real tokenizer with merges, a template that drops old thinking, and a scripted engine
that remembers what it sampled in which context."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.connectors.engines.engine import Generation, PromptTooLong
from headrace.connectors.model_folder import ModelFolder
from headrace.schemas.parts import Sampling
from headrace.schemas.parts import Sequence as TokenSequence
from headrace.schemas.records import Prompt

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m['role'] == 'assistant' %}
{%- set content = m['content'] %}
{%- if loop.index0 < ns.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif -%}
<|im_start|>assistant
{{ content }}
{%- for call in m['tool_calls'] or [] %}<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m['role'] == 'tool' %}<|im_start|>user
<tool_response>
{{ m['content'] }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat_folder(folder: Path) -> Path:
    """A model folder without weights: a byte-level tokenizer with merges, the template, the end-of-turn token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = ["the thing is that this then thus", "look up the weather there", "word " * 9]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(word, special=word.startswith("<|")) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "none", "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|pad|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def chat_model(folder: Path) -> ModelFolder:
    """The same as the worker opens it."""
    return ModelFolder(chat_folder(folder))


def rendered(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """What the template makes of messages, as transformers would, which takes seconds to import."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    made.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = made.from_string(TEMPLATE)
    given = {"messages": list(messages), "tools": list(tools) or None, "add_generation_prompt": True}
    return template.render(**given, **(settings or {}))


class RecordingPolicy:
    """A PolicySession whose engine says what ``say`` gives for the text of its context, in tokens cut at random.

    calls: (context ids, sampled ids) of every generation. Text that ends in ``<|im_end|>`` ends by the token, other
    text by its length.
    """

    def __init__(
        self, folder: ModelFolder, say: Callable[[str], str], *, seed: int = 0, policy: int = 0, context: int = 1 << 20
    ) -> None:
        self.policy = policy
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.samplings: list[Sampling] = []
        self._folder, self._say, self._context = folder, say, context
        self._random = random.Random(seed)

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        return self._folder.encode(prompt)

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        return self._folder.decode(tokens)

    def tokenize(self, text: str) -> npt.NDArray[np.int32]:
        return self._folder.tokenize(text)

    def detokenize(self, tokens: npt.NDArray[np.int32]) -> str:
        return self._folder.detokenize(tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        return rendered(messages, tools, settings)

    async def generate(self, prompt: npt.NDArray[np.int32], sampling: Sampling) -> Generation:
        if prompt.size >= self._context:
            raise PromptTooLong(f"the prompt has {prompt.size} tokens")
        text = self._say(self._folder.detokenize(prompt))
        tokens = self._pieces(text)
        end = "stop" if text.endswith("<|im_end|>") else "length"
        if tokens.size > sampling.max_new_tokens:
            tokens, end = tokens[: sampling.max_new_tokens], "length"
        number = len(self.calls)
        self.calls.append((tuple(prompt.tolist()), tuple(tokens.tolist())))
        self.samplings.append(sampling)
        logprobs = -np.arange(1, tokens.size + 1, dtype=np.float32) / 100 - number
        return Generation(number, end, tokens, logprobs, np.full(tokens.size, number, np.int32))

    def _pieces(self, text: str) -> npt.NDArray[np.int32]:
        """Tokens of a text, not the ones that the tokenizer would choose: cut at places of the engine's own."""
        parts: list[npt.NDArray[np.int32]] = []
        while text:
            special = next((s for s in SPECIAL if text.startswith(s)), None)
            size = len(special) if special else self._random.randint(1, 4)
            piece = text[:size]
            if not special and (at := min((piece.find(s[0]) for s in SPECIAL if s[0] in piece[1:]), default=-1)) > 0:
                piece = piece[:at]
            parts.append(self._folder.tokenize(piece))
            text = text[len(piece) :]
        return np.concatenate(parts)


def assert_sampled_in_context(sequences: Sequence[TokenSequence], policy: RecordingPolicy) -> int:
    """Every run of trained tokens is what the engine sampled after exactly the tokens in front of it, each call once.

    Returns the count of calls that are trained.
    """
    open_calls = list(enumerate(policy.calls))
    trained = 0
    for sequence in sequences:
        at = sequence.prompt_length
        while at < sequence.tokens.size:
            if not sequence.mask[at]:
                at += 1
                continue
            number = int(sequence.versions[at])
            context, made = policy.calls[number]
            run = slice(at, at + int((sequence.versions[at:] == number).sum()))
            assert sequence.mask[run].all()
            assert tuple(sequence.tokens[:at].tolist()) == context, "not the context that it was sampled in"
            assert tuple(sequence.tokens[run].tolist()) == made[: run.stop - run.start]
            expected = -np.arange(1, run.stop - run.start + 1, dtype=np.float32) / 100 - number
            assert np.array_equal(sequence.logprobs[run], expected)
            open_calls = [call for call in open_calls if call[0] != number]
            trained += 1
            at = run.stop
        outside = sequence.mask == 0
        assert (sequence.versions[outside] == -1).all() and (sequence.logprobs[outside] == 0).all()
    assert not open_calls, f"{len(open_calls)} calls are in no sequence"
    return trained
