"""Fixtures for every test: one worked example of each record; and the order in which test processes take the suite."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from suite_order import pytest_collection_modifyitems, pytest_xdist_make_scheduler

from headrace.schemas import parts, records

__all__ = ("pytest_collection_modifyitems", "pytest_xdist_make_scheduler")



def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a test that failed at once: the end of the suite may be twenty minutes away."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.when} failed: {report.nodeid}", file=sys.__stderr__, flush=True)


settings.register_profile("untimed", deadline=None)  # a busy machine fails no example
settings.load_profile("untimed")


def sequence(**over: Any) -> parts.Sequence:
    """A sequence of two prompt and two sampled tokens; ``over`` replaces fields."""
    fields: dict[str, Any] = {
        "policy": 0,
        "role": "policy",
        "prompt_length": 2,
        "end_reason": "stop",
        "oldest_version": 7,
        "newest_version": 8,
        "tokens": np.array([9, 4, 6, 2], "int32"),
        "logprobs": np.array([0, 0, -0.2, -0.1], "float32"),
        "mask": np.array([0, 0, 1, 1], "uint8"),
        "versions": np.array([-1, -1, 7, 8], "int32"),
        "extras": {"values": parts.Extra(dtype="float32", shape=[1], data=b"\0\0\0\0")},
    }
    return parts.Sequence(**{**fields, **over})


def _examples() -> dict[str, records.Record]:
    source = parts.Source(topic="prompts", partition=0, offset=3)
    prompt = records.Prompt(
        prompt_id="7d0c8a3e4f2b1a90",
        stream="main",
        dataset="train.jsonl",
        row=3,
        epoch=0,
        position=3,
        reward="exact_match",
        prompt="52436=",
        answer="23456",
        messages=[parts.Message(role="user", content="naïve ☃")],
        columns={"level": "4"},
    )
    ids: dict[str, Any] = {"group": 5, "replica": 0, "attempt": 0}
    who: dict[str, Any] = {"worker": "rollout-0", "incarnation": 1764478800000}
    part: dict[str, Any] = {
        "policy": 0,
        "group": 5,
        "replica": 0,
        "stream": "main",
        "prompt_id": "7d0c8a3e4f2b1a90",
        "raw_reward": 1.0,
        "shaped_reward": 1.0,
        "length": 2,
        "oldest_version": 7,
        "newest_version": 8,
        "end_reason": "stop",
        "rewards": [parts.Reward(name="exact_match", value=1.0)],
        "sources": [source],
        "sequences": [sequence()],
    }
    made = [
        records.RunManifest(
            run="first", created_ms=1, tokenizer_digest="9f", policies=["main"], partitions={"tasks": 64}
        ),
        records.RunEnd(reason="steps", ended_ms=2),
        records.Taken(stream="main", position=1042),
        prompt,
        records.End(reason="epochs", count=512),
        records.Demand(
            **who,
            role="any",
            capacity=65,
            next_sequence=12,
            inbox=7,
            sent_ms=3,
            policies=[parts.HostedPolicy(policy=0, version=4)],
            held=[parts.HeldTask(kind="train", **ids)],
        ),
        records.Task(
            kind="train",
            **ids,
            **who,
            stream="main",
            sequence=12,
            issued_ms=1,
            deadline_ms=60001,
            prompt=prompt,
            policies=[parts.PolicyBound(policy=0, min_version=4)],
            sources=[source],
        ),
        records.Cancel(kind="train", **ids, **who, reason="closed"),
        records.Suspend(worker="rollout-0"),
        records.Resume(worker="rollout-0"),
        records.Stop(reason="steps", policy=0),
        records.Admission(
            group=5,
            prompt_id="7d0c8a3e4f2b1a90",
            stream="main",
            group_size=8,
            extra_replicas=0,
            admitted_ms=1,
            deadline_ms=180001,
            watermark=1,
            policies=[parts.AdmittedPolicy(policy=0, min_version=4, cap=64)],
        ),
        records.Failed(kind="train", group=5, replica=3, attempts=3, lost_leases=0, reason="reward raised"),
        records.Trajectory(
            **ids,
            **who,
            stream="main",
            prompt_id="7d0c8a3e4f2b1a90",
            status="train",
            end_reason="stop",
            reward=1.0,
            tokens=2,
            started_ms=1,
            finished_ms=80,
            prompt_text="52436=",
            completion_text="23456",
            metrics={"retried": 1.0},
            rewards=[parts.Reward(name="exact_match", value=1.0)],
            oldest_versions={"0": 7},
            roles=[parts.RolePart(role="solver", policy=0, tokens=2)],
            sequences=[sequence()],
            blob=parts.BlobRef(key="runs/first/blobs/5/0/0", size=7, digest="ab"),
        ),
        records.Score(
            group=5, worker="rollout-0", finished_ms=90, scores=[parts.MemberScore(replica=0, name="judge", value=0.5)]
        ),
        records.Partial(**ids, **who, written_ms=70, sequences=[sequence()]),
        records.Member(**part, attempt=0, status="train"),
        records.Group(
            policy=0,
            group=5,
            stream="main",
            prompt_id="7d0c8a3e4f2b1a90",
            members=8,
            counted=8,
            trained=8,
            short=False,
            reward_mean=0.5,
            reward_std=0.53,
            raw_mean=0.5,
            raw_std=0.53,
            oldest_version=7,
            newest_version=8,
            tokens=16,
            closed_ms=90,
            roles=[parts.RoleStatistics(role="solver", mean=0.5, std=0.53, count=8)],
            sources=[source],
        ),
        records.Opened(policy=0, group=5, stream="main", prompt_id="7d0c8a3e4f2b1a90", min_version=4, cap=64),
        records.Skipped(
            policy=0,
            stream="main",
            prompt_id="7d0c8a3e4f2b1a90",
            epoch=2,
            position=1041,
            operator="greso",
            reason="probably_easy",
            detail="3 groups in a row were easy; kept with 0.1250, drew 0.8123",
            sources=[source],
        ),
        records.Kept(policy=0, group=5, reward_mean=0.5, reward_std=0.53, raw_mean=0.5, raw_rewards=[1.0, 0.0]),
        records.NeedsScore(policy=0, group=5, members=[source]),
        records.Closed(
            policy=0, group=5, reason="filtered", by="assemble", operator="dynamic_sampling", detail="zero_variance"
        ),
        records.Batched(policy=0, batch=3, groups=[5, 6, 9]),
        records.Trained(policy=0, batch=3, version=3, first=True),
        records.Item(
            **part,
            batch=3,
            lane=1,
            index=0,
            use=0,
            group_mean=0.5,
            group_std=0.53,
            group_count=8,
            group_roles=[parts.RoleStatistics(role="solver", mean=0.5, std=0.53, count=8)],
        ),
        records.Manifest(
            policy=0,
            batch=3,
            start_version=2,
            since_version=0,
            fresh_groups=1,
            replayed_groups=0,
            tokens=2,
            sequences=1,
            trajectories=1,
            groups=1,
            composed_ms=95,
            lanes=[parts.Lane(lane=0, count=1, tokens=2, digest="cd")],
            members=[parts.ManifestMember(group=5, replica=0, use=0, lane=0, oldest_version=7)],
        ),
        records.Step(
            policy=0,
            batch=3,
            version=3,
            lineage=0,
            updates=1,
            loss=-0.01,
            tokens=2,
            sequences=1,
            wait_seconds=0.2,
            step_seconds=0.15,
            publish_seconds=0.01,
            delta_bytes=90000,
            changed_share=0.45,
            finished_ms=99,
            metrics={"reward/mean": 0.5},
        ),
        records.Rollback(policy=0, lineage=1, base_lineage=0, base_batch=40, base_version=40, discard=True),
        records.Resumed(policy=0, lineage=1, batch=40, version=58),
        records.Head(
            policy=0,
            version=3,
            batch=3,
            lineage=0,
            kind="delta",
            manifest_key="k",
            manifest_sha256="s",
            root_digest="r",
            layout_digest="l",
            size=90000,
            published_ms=98,
            manifest=b'{"body":{}}',
        ),
        records.EvalResult(
            policy=0,
            suite="heldout",
            prompt_id="7d0c8a3e4f2b1a90",
            replica=0,
            version=10,
            oldest_version=10,
            newest_version=11,
            reward=1.0,
            tokens=6,
            end_reason="stop",
            finished_ms=99,
            rewards=[parts.Reward(name="verdict", value=1.0, role="verifier")],
        ),
    ]
    return {type(record).__name__: record for record in made}


@pytest.fixture(scope="session")
def examples() -> dict[str, records.Record]:
    """One worked example of every record, by name."""
    return _examples()


@pytest.fixture(scope="session")
def make_sequence() -> Callable[..., parts.Sequence]:
    """Makes a small sequence; keyword arguments replace its fields."""
    return sequence


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random 0.11M Qwen3 with a tokenizer of single characters, made offline."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model") / "tiny"
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789=abcdefghijklmnopqrstuvwxyz ?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=192, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
