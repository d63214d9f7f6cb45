"""Sequences of many calls: every trained token stands in exactly the context that it was sampled in."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from chat_policy import RecordingPolicy, assert_sampled_in_context, chat_model
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.connectors.engines.engine import Generation
from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.capture.transcript import Reply, Transcript
from headrace.pipeline.workflows.workflow import EpisodeFailed
from headrace.schemas.parts import Sampling

END = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return chat_model(tmp_path_factory.mktemp("chat"))


def asked(transcript: Transcript, text: str, **more: object) -> Reply:
    return asyncio.run(transcript.sample(transcript.context(text), **more))  # type: ignore[arg-type]


def test_a_context_that_extends_the_last_call_goes_on_in_its_sequence(folder: ModelFolder) -> None:
    policy = RecordingPolicy(folder, lambda text: f"the weather{END}")
    transcript = Transcript(policy, Sampling(max_new_tokens=50, seed=3))
    first = asked(transcript, "the thing")
    assert (first.text, first.content, first.raw) == ("the weather", "the weather", f"the weather{END}")
    asked(transcript, f"the thing{first.raw}\nthen?")
    (sequence,) = transcript.sequences()
    assert sequence.prompt_length == folder.tokenize("the thing").size
    assert folder.detokenize(sequence.tokens) == f"the thingthe weather{END}\nthen?the weather{END}"
    assert assert_sampled_in_context([sequence], policy) == 2
    ends = np.flatnonzero(sequence.tokens == folder.stop_token_ids[0])
    assert sequence.mask[ends].tolist() == [1, 1], "the end of a turn is sampled, so it is trained"
    assert (sequence.oldest_version, sequence.newest_version, sequence.end_reason) == (0, 1, "stop")
    assert policy.samplings[0].seed == 3 and policy.samplings[1].seed != 3


def test_history_keeps_the_ids_that_were_sampled(folder: ModelFolder) -> None:
    policy = RecordingPolicy(folder, lambda text: f"the thing is that this{END}", seed=5)
    transcript = Transcript(policy, Sampling(max_new_tokens=50))
    first = asked(transcript, "word ")
    made = np.array(policy.calls[0][1], np.int32)
    assert not np.array_equal(made, folder.tokenize(folder.detokenize(made))), "the tokens are not the canonical ones"
    again = transcript.context(f"word {first.raw} more")
    assert again.ids[: len(policy.calls[0][0]) + made.size].tolist() == [*policy.calls[0][0], *made.tolist()]


def test_another_history_begins_another_sequence_and_an_old_one_is_not_trained_twice(folder: ModelFolder) -> None:
    replies = iter(["<think>thus</think>that", "this", "then"])
    policy = RecordingPolicy(folder, lambda text: next(replies) + END)
    transcript = Transcript(policy, Sampling(max_new_tokens=50))
    asked(transcript, "q ")
    asked(transcript, f"q that{END} and ")
    asked(transcript, f"q <think>thus</think>that{END} or ")
    first, second = transcript.sequences()
    assert assert_sampled_in_context([first, second], policy) == 3
    assert folder.detokenize(second.tokens) == f"q that{END} and this{END}"
    assert folder.detokenize(first.tokens).endswith(f"or then{END}")


def test_two_calls_from_one_context_make_two_sequences(folder: ModelFolder) -> None:
    replies = iter(["a", "b", "c"])
    policy = RecordingPolicy(folder, lambda text: next(replies) + END)
    transcript = Transcript(policy, Sampling(max_new_tokens=50))
    first = asked(transcript, "q ")
    for _ in range(2):
        asked(transcript, f"q {first.raw} go ")
    sequences = transcript.sequences()
    assert len(sequences) == 2
    assert assert_sampled_in_context(sequences, policy) == 3
    assert sequences[1].mask[: sequences[1].prompt_length].sum() == 0
    assert sequences[1].tokens[: len(policy.calls[0][0])].tolist() == list(policy.calls[0][0])


def test_calls_at_the_same_time_never_share_a_sequence(folder: ModelFolder) -> None:
    policy = RecordingPolicy(folder, lambda text: f"that{END}")
    transcript = Transcript(policy, Sampling(max_new_tokens=50))
    first = asked(transcript, "q ")
    gate = asyncio.Event()
    slow = policy.generate

    async def waits(prompt: np.ndarray, sampling: Sampling) -> Generation:
        await gate.wait()
        return await slow(prompt, sampling)

    async def both() -> None:
        policy.generate = waits  # type: ignore[method-assign]
        texts = [f"q {first.raw} {more}" for more in ("a", "b", "c")]
        tasks = [asyncio.create_task(transcript.sample(transcript.context(text))) for text in texts]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(both())
    assert len(transcript.sequences()) == 3
    assert assert_sampled_in_context(transcript.sequences(), policy) == 4


def test_a_stop_text_ends_a_reply_at_the_first_token_that_completes_it(folder: ModelFolder) -> None:
    policy = RecordingPolicy(folder, lambda text: f"look</search>up the weather{END}")
    transcript = Transcript(policy, Sampling(max_new_tokens=50))
    reply = asked(transcript, "q ", stop=["</search>", "nothing"])
    assert "</search>" in reply.text and "weather" not in reply.text and reply.end_reason == "stop"
    (sequence,) = transcript.sequences()
    assert sequence.mask.sum() == reply.ids.size < len(policy.calls[0][1])
    again = transcript.context(f"q {reply.raw}\n")
    assert again.extends is not None


def test_what_may_not_be_trained_is_masked_and_said(folder: ModelFolder) -> None:
    policy = RecordingPolicy(folder, lambda text: f"that{END}")
    narrow = Transcript(policy, Sampling(max_new_tokens=50, top_p=0.5))
    asked(narrow, "q ")
    (sequence,) = narrow.sequences()
    assert not sequence.trainable and sequence.mask.sum() == 0 and sequence.oldest_version == -1
    mixed = Transcript(policy, Sampling(max_new_tokens=50))
    first = asked(mixed, "q ")
    asked(mixed, f"q {first.raw} go", sampling=Sampling(max_new_tokens=50, temperature=0.5))
    assert [s.sampling.temperature for s in mixed.sequences()] == [1.0, 0.5], "one temperature for a sequence"


def test_a_generation_that_broke_off_or_is_not_finite_fails_the_episode(folder: ModelFolder) -> None:
    policy = RecordingPolicy(folder, lambda text: "that")
    transcript = Transcript(policy, Sampling(max_new_tokens=50))
    made = asyncio.run(policy.generate(folder.tokenize("q"), Sampling(max_new_tokens=9)))

    async def aborted(prompt: np.ndarray, sampling: Sampling) -> Generation:
        return Generation(1, "abort", made.tokens, made.logprobs, made.versions)

    async def broken(prompt: np.ndarray, sampling: Sampling) -> Generation:
        return Generation(1, "stop", made.tokens, made.logprobs * np.nan, made.versions)

    for engine, says in ((aborted, "broke the generation off"), (broken, "nan at version")):
        policy.generate = engine  # type: ignore[method-assign]
        with pytest.raises(EpisodeFailed, match=says):
            asked(transcript, "q")
    assert transcript.sequences() == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 12))
def test_whatever_a_client_does_with_the_history(folder: ModelFolder, seed: int, steps: int) -> None:
    """Random agents: go on, go back, change a word, cut the thinking, repeat, cut off replies, ids instead of text."""
    source = random.Random(seed)
    words = ("the", "thing", " look", "<think>hm</think>", "ü", " that\n", "then ", "\U0001f642")

    def say(text: str) -> str:
        return "".join(source.choices(words, k=source.randint(1, 6))) + source.choice([END, END, ""])

    policy = RecordingPolicy(folder, say, seed=seed)
    transcript = Transcript(policy, Sampling(max_new_tokens=40))
    texts = ["start "]
    for _ in range(steps):
        text = source.choice(texts[-3:] if source.random() < 0.8 else texts)
        change = source.random()
        if change < 0.15:
            text = text.replace("<think>hm</think>", "")
        elif change < 0.25:
            text = text.replace("thing", "thong")
        context = transcript.context(text)
        if source.random() < 0.2:
            context = transcript.context_of_ids(context.ids)
        reply = asyncio.run(transcript.sample(context))
        texts.append(context.text + reply.raw + source.choice(["\n<|im_start|>user\nmore", "", " and "]))
    sequences = transcript.sequences()
    assert assert_sampled_in_context(sequences, policy) == steps
    assert len(sequences) <= steps == transcript.calls
