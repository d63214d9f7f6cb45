"""Rollout: continuous batching against a plain batch, log-probs against a full forward, and what a task costs beside
them.

The model is a random Qwen3 of 0.11 million parameters. Engine speeds are tokens per second of CPU time in one process
and one thread, as a ratio from one run. Costs of a task are those of a worker process on a local broker with an
engine that samples without a model: CPU time per trajectory, and the time from a task's commit to its acknowledged
result.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from confluent_kafka import TopicPartition

from benchmarks.form import Figure, main, median
from headrace.connectors.engines.engine import Request
from headrace.connectors.kafka import Connection, RawRecord
from headrace.connectors.stores.open import open_store
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.delta_layout import Layout
from headrace.schemas.ids import inbox_of
from headrace.schemas.parts import PolicyBound, Sampling
from headrace.schemas.records import Demand, Prompt, Record, RunManifest, Task, Trajectory
from headrace.schemas.topics import partition_counts
from headrace.trainers.step_to_delta import DeltaPublisher

SLOTS = 128
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789=abcdefghijklmnopqrstuvwxyz ?"]


def make_model(folder: Path) -> dict[str, Any]:
    """Write a model folder; its weights as bfloat16 bits by name."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, intermediate_size=192, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return {n: p.detach().view(torch.int16).numpy().view(np.uint16).copy() for n, p in model.named_parameters()}


def requests(count: int) -> list[Request]:
    """Prompts of 5 to 7 tokens, completions of 5 to 8."""
    r = random.Random(0)
    return [
        Request(
            i,
            np.array([r.randrange(4, 14) for _ in range(r.randint(5, 7))], np.int32),
            Sampling(max_new_tokens=r.randint(5, 8), seed=i),
        )
        for i in range(count)
    ]


def engine_speed(folder: Path, bits: dict[str, Any], count: int) -> float:
    """Tokens per CPU second of the engine, its rows refilled as they end."""
    from headrace.connectors.engines.transformers import TransformersEngine

    engine = TransformersEngine(folder, slots=SLOTS)
    engine.load_weights(bits, 0)
    todo = requests(count)
    for request in todo:
        engine.add(request)
    engine.step()
    began, tokens = time.process_time(), 0
    while engine.active:
        tokens += sum(done.tokens.size for done in engine.step())
    return tokens / (time.process_time() - began)


def plain_speed(folder: Path, count: int) -> float:
    """Tokens per CPU second of left-padded batches that run to their longest row."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    todo, tokens = requests(count), 0
    began = time.process_time()
    with torch.inference_mode():
        for at in range(0, count, SLOTS):
            part = todo[at : at + SLOTS]
            width = max(one.prompt.size for one in part)
            ids = torch.zeros(len(part), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, one in enumerate(part):
                ids[row, width - one.prompt.size :] = torch.from_numpy(one.prompt.astype(np.int64))
                mask[row, width - one.prompt.size :] = 1
            tokens += _plain_batch(model, ids, mask, np.array([one.sampling.max_new_tokens for one in part]))
    return tokens / (time.process_time() - began)


def _plain_batch(model: Any, ids: Any, mask: Any, limits: Any) -> int:
    """Decode one batch; tokens of rows beyond their limit are not counted."""
    import torch

    position = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=position, use_cache=True, logits_to_keep=1)
    counted, alive, last = 0, np.ones(len(limits), bool), position[:, -1:]
    for step in range(int(limits.max())):
        logp = out.logits[:, -1].log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1)
        alive &= limits > step
        counted += int(alive.sum())
        alive &= token[:, 0].numpy() != 2
        if not alive.any():
            break
        mask, last = torch.cat([mask, torch.ones_like(token)], 1), last + 1
        out = model(token, attention_mask=mask, position_ids=last, past_key_values=out.past_key_values, use_cache=True)
    return counted


def logprob_error(folder: Path, bits: dict[str, Any]) -> float:
    """Largest difference between the engine's log-probs and those of a forward over prompt and completion."""
    import torch
    from transformers import AutoModelForCausalLM

    from headrace.connectors.engines.engine import generate
    from headrace.connectors.engines.transformers import TransformersEngine

    engine = TransformersEngine(folder, slots=SLOTS)
    engine.load_weights(bits, 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    todo, worst = requests(300), 0.0
    with torch.inference_mode():
        for request, done in zip(todo, generate(engine, todo), strict=True):
            ids = torch.from_numpy(np.concatenate([request.prompt, done.tokens]).astype(np.int64))[None]
            logp = model(ids).logits[0, request.prompt.size - 1 : -1].log_softmax(-1)
            full = logp[torch.arange(done.tokens.size), ids[0, request.prompt.size :]].numpy()
            worst = max(worst, float(np.abs(full - done.logprobs).max()))
    return worst


class Run:
    """A run on a local broker with one worker; the benchmark plays ``schedule``."""

    def __init__(self, folder: Path, model: Path, bits: dict[str, Any]) -> None:
        broker = [sys.executable, "-m", "headrace.connectors.broker", "--data", str(folder / "broker"), "--port", "0"]
        self.broker = subprocess.Popen([*broker, "--exit-with-parent"], stdout=subprocess.PIPE, text=True)
        assert self.broker.stdout is not None
        ready = next(line for line in self.broker.stdout if line.startswith("ready "))
        self.config = RunConfig.model_validate(
            {
                "run": {"id": "benchmark", "folder": str(folder)},
                "kafka": {"bootstrap": f"127.0.0.1:{ready.split()[1]}"},
                "rollout": {"engine": "scripted", "slots": SLOTS, "options": {"mean_length": 7, "sigma": 0.2}},
                "policies": {"main": {"model": str(model)}},
                "streams": {"main": {"dataset": "none"}},
            }
        )
        self.connection = Connection.of(self.config.kafka, "benchmark")
        counts = partition_counts(["main"], groups=8, inboxes=64, lanes=8)
        self.connection.ensure_topics(counts)
        self.producer = self.connection.producer("schedule")
        manifest = RunManifest(
            run="benchmark", created_ms=1, tokenizer_digest="", policies=["main"], partitions=counts
        )
        self.send("run", manifest, 0, key=b"manifest")
        store = open_store(self.config.store, self.config.run_folder())
        layout = Layout.of(bits, dict.fromkeys(bits, "bfloat16"))
        DeltaPublisher(store, "benchmark", "main", layout).publish(bits, version=0, lineage=0, batch=0, parent=None)
        self.reader = self.connection.consumer("reader", auto_offset_reset="earliest")
        places = [("demand", 0), *(("trajectories", p) for p in range(8))]
        self.reader.assign([TopicPartition(self.connection.topic(t), p, 0) for t, p in places])
        dump_config(self.config, folder / "config.json")
        worker = [sys.executable, "-m", "headrace.pipeline.task_to_trajectory", "--config", str(folder / "config.json")]
        self.worker = subprocess.Popen([*worker, "--instance", "rollout-0"], stdout=subprocess.DEVNULL)
        self.issued = 0

    def send(self, topic: str, record: Record, partition: int, key: bytes | None = None) -> None:
        """Write a record."""
        headers = headers_of(record, "benchmark", "0")
        self.connection.produce(self.producer, topic, encode(record), partition=partition, key=key, headers=headers)
        self.producer.poll(0)

    def received(self, seconds: float) -> Iterator[tuple[int, Record]]:
        """Records with their times, for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            message = self.reader.poll(0.05)
            if message is not None and message.error() is None:
                raw = RawRecord.of(message, "benchmark")
                yield raw.timestamp_ms, raw.decoded()

    def issue(self, demand: Demand, most: int) -> None:
        """Tasks for the free places of a Demand, at most so many."""
        free = demand.capacity - len(demand.held) - (self.issued - demand.next_sequence)
        for _ in range(min(free, most)):
            now = time.time_ns() // 1_000_000
            group, replica = divmod(self.issued, 8)
            prompt = Prompt(
                prompt_id=f"{group:016x}", stream="main", dataset="none", row=0, epoch=0, position=group,
                reward="exact_match", prompt="52436=", answer="23456",
            )  # fmt: skip
            task = Task(
                kind="train", group=group, replica=replica, attempt=0, stream="main", worker=demand.worker,
                incarnation=demand.incarnation, sequence=self.issued, issued_ms=now, deadline_ms=now + 60_000,
                policies=[PolicyBound(policy=0, min_version=0)], prompt=prompt,
            )  # fmt: skip
            self.send("tasks", task, inbox_of(demand.worker, 64))
            self.issued += 1

    def close(self) -> None:
        """End both processes."""
        self.reader.close()
        for process in (self.worker, self.broker):
            process.terminate()
            process.wait(20)


def task_costs(run: Run, seconds: float) -> tuple[float, float]:
    """CPU microseconds of the worker per trajectory under load, and milliseconds from a lone task to its result."""
    demand = next(record for _, record in run.received(60) if isinstance(record, Demand))
    alone: list[float] = []
    for _ in range(20):
        run.issue(demand, 1)
        sent = time.time_ns() // 1_000_000
        alone += [next(at for at, record in run.received(20) if isinstance(record, Trajectory)) - sent]
        demand = next(r for _, r in run.received(20) if isinstance(r, Demand) and r.next_sequence == run.issued)
    process = psutil.Process(run.worker.pid)
    done, before = 0, sum(process.cpu_times()[:2])
    run.issue(demand, SLOTS)
    for _, record in run.received(seconds):
        if isinstance(record, Demand):
            run.issue(record, SLOTS)
        done += isinstance(record, Trajectory)
    return (sum(process.cpu_times()[:2]) - before) / max(1, done) * 1e6, median(alone)


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """Engine first, then the worker."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    count, rounds, seconds = (1000, 1, 3.0) if given.quick else (4000, 3, 10.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bits = make_model(folder / "model")
        model = folder / "model"
        pairs = [(engine_speed(model, bits, count), plain_speed(model, count)) for _ in range(rounds)]
        yield Figure("engine_tokens_per_cpu_second", median(e for e, _ in pairs), "tok/s")
        yield Figure("engine_vs_plain_batch", median(e / p for e, p in pairs), "", 0.8, anchor="left-padded batch")
        yield Figure("logprob_error", logprob_error(folder / "model", bits), "", 1e-4, False, "full forward, float32")
        run = Run(folder, folder / "model", bits)
        try:
            cost, alone = task_costs(run, seconds)
        finally:
            run.close()
        yield Figure("worker_cpu_us_per_trajectory", cost, "us", anchor="without a model")
        yield Figure("task_to_result_ms", alone, "ms", anchor="one task, idle worker, 7 tokens without a model")


if __name__ == "__main__":
    main(__doc__, measure)
