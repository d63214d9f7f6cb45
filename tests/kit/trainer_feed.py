"""Feeds a trainer: a run's topics, a small model folder, and batches as ``batch`` would write them."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.connectors.kafka import Connection, Producer
from headrace.schemas import parts
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.digests import lane_digest
from headrace.schemas.records import End, Item, Manifest, Record
from headrace.schemas.topics import partition_counts

VOCABULARY = 20


def make_model(folder: Path, *, hidden: int = 32, seed: int = 0) -> Path:
    """A Qwen3 of a few thousand parameters with a tokenizer.json of digits."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    words = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789=+-*/;"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=2 * hidden,
        head_dim=hidden // 2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_config(model: Path, folder: Path, run: str, *, lanes: int = 4, depth: float = 1, **trainer: Any) -> RunConfig:
    """A run of one policy ``main``."""
    fast = {"backend": "torch", "precision": "fp32", "batch_groups": 4, "lr": 1e-3, "checkpoint_every": 3}
    return RunConfig.model_validate(
        {
            "run": {"id": run, "folder": str(folder), "lanes": lanes},
            "trainer": {**fast, **trainer},
            "policies": {"main": {"model": str(model), "depth": depth}},
            "streams": {"main": {"dataset": "none.jsonl"}},
        }
    )


def make_items(batch: int, *, groups: int, size: int, version: int, seed: int, behave: Any = None) -> list[Item]:
    """Whole groups of made-up trajectories; ``behave(tokens, prompt)`` gives log-probs, by default -2 a token."""
    rng = np.random.default_rng([seed, batch])
    out = []
    for group in range(groups):
        rewards = rng.integers(0, 2, size).astype(float)
        rewards[0], rewards[1] = 0.0, 1.0
        for replica in range(size):
            prompt, length = int(rng.integers(2, 6)), int(rng.integers(2, 9))
            n = prompt + length
            tokens = rng.integers(4, VOCABULARY, n).astype(np.int32)
            mask = np.r_[np.zeros(prompt, np.uint8), np.ones(length, np.uint8)]
            given = behave(tokens, prompt) if behave else np.full(n, -2.0, np.float32)
            sequence = parts.Sequence(
                policy=0,
                role="policy",
                prompt_length=prompt,
                end_reason="stop",
                oldest_version=version,
                newest_version=version,
                tokens=tokens,
                logprobs=np.where(mask == 1, given, 0).astype(np.float32),
                mask=mask,
                versions=np.where(mask == 1, version, -1).astype(np.int32),
            )
            out.append(
                Item(
                    policy=0,
                    batch=batch,
                    lane=0,
                    index=len(out),
                    use=0,
                    group=batch * 1000 + group,
                    replica=replica,
                    stream="main",
                    prompt_id="0" * 16,
                    raw_reward=float(rewards[replica]),
                    shaped_reward=float(rewards[replica]),
                    group_mean=float(rewards.mean()),
                    group_std=float(rewards.std(ddof=1)),
                    group_count=size,
                    length=length,
                    oldest_version=version,
                    newest_version=version,
                    end_reason="stop",
                    sequences=[sequence],
                )
            )
    return out


class Feed:
    """Writes batches and the End of a policy in transactions."""

    def __init__(self, connection: Connection, config: RunConfig, policy: str = "main") -> None:
        self.connection, self.config = connection, config
        self._policy, self._lanes = config.policy_names().index(policy), f"batches.{policy}"
        counts = partition_counts(config.policy_names(), groups=1, inboxes=1, lanes=config.run.lanes)
        connection.ensure_topics(counts)
        self.producer = connection.producer("feed", f"{config.run.id}.batch.feed-{policy}")
        self.producer.init_transactions(30)
        self._plain: Producer | None = None

    def batch(
        self, number: int, *, groups: int = 4, size: int = 4, lanes: Sequence[int] | None = None, **more: Any
    ) -> None:
        """Compose batch ``number``; ``lanes`` says which lanes get the groups in turn (default: all)."""
        items = make_items(number, groups=groups, size=size, version=number - 1, seed=0, **more)
        self.write(number, items, list(lanes if lanes is not None else range(self.config.run.lanes)))

    def write(self, number: int, items: Sequence[Item], lanes: Sequence[int]) -> None:
        """Write items of whole groups to lanes in turn, and their Manifest."""
        from dataclasses import replace

        keys = list(dict.fromkeys(item.group for item in items))
        lane_of = {key: lanes[at % len(lanes)] for at, key in enumerate(keys)}
        values: dict[int, list[bytes]] = {lane: [] for lane in range(self.config.run.lanes)}
        tokens = dict.fromkeys(values, 0)
        self.producer.begin_transaction()
        for item in items:
            lane = lane_of[item.group]
            placed = replace(item, policy=self._policy, lane=lane, index=len(values[lane]))
            values[lane].append(self._send(self._lanes, placed, lane))
            tokens[lane] += item.length
        manifest = Manifest(
            policy=self._policy,
            batch=number,
            start_version=number - 1,
            since_version=0,
            fresh_groups=len(keys),
            replayed_groups=0,
            tokens=sum(item.length for item in items),
            sequences=len(items),
            trajectories=len(items),
            groups=len(keys),
            composed_ms=int(time.time() * 1000),
            lanes=[
                parts.Lane(lane=lane, count=len(v), tokens=tokens[lane], digest=lane_digest(v))
                for lane, v in values.items()
            ],
            members=[
                parts.ManifestMember(
                    group=i.group, replica=i.replica, use=0, lane=lane_of[i.group], oldest_version=i.oldest_version
                )
                for i in items
            ],
        )
        self._send("manifests", manifest, self._policy)
        self.producer.commit_transaction(30)

    def end(self, reason: str = "epochs") -> None:
        """No more batches follow."""
        self.producer.begin_transaction()
        self._send("manifests", End(reason=reason, policy=self._policy), self._policy)
        self.producer.commit_transaction(30)

    def _send(self, topic: str, record: Record, partition: int) -> bytes:
        value = encode(record)
        headers = headers_of(record, self.config.run.id, "test")
        self.connection.produce(self.producer, topic, value, partition=partition, headers=headers)
        return value

    def producer_of_run(self) -> Producer:
        """A producer for topics that belong to no stage."""
        if self._plain is None:
            self._plain = self.connection.producer("feed")
        return self._plain

    def records(self, topic: str) -> list[Record]:
        """Everything committed in a topic."""
        return [raw.decoded() for raw in self.connection.read_topic(topic)]


@contextmanager
def local_broker(folder: Path, *, port: int = 0) -> Iterator[str]:
    """A local broker process; gives its address."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "headrace.connectors.broker",
            "--data",
            str(folder),
            "--port",
            str(port),
            "--exit-with-parent",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("ready"))
        yield f"127.0.0.1:{line.split()[1]}"
    finally:
        process.terminate()
        process.wait(10)


def trainer_arguments(config: RunConfig, bootstrap: str, *more: str, policy: str = "main") -> list[str]:
    """Arguments of ``python -m headrace.trainers``; writes the configuration that they name."""
    path = config.run_folder() / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    dump_config(config, path)
    own = ["--config", str(path), "--policy", policy, "--instance", f"trainer-{policy}", "--bootstrap", bootstrap]
    return [*own, *more]
