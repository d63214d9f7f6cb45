"""Does every loss learn from old data? Final accuracy on sort_digits by loss and exact staleness, over two seeds.

The recipe's model, data, reward, engine and trainer in one process: batch t is sampled by the weights of version t - d,
for every token, so that staleness is d and not what a machine's speeds make of it (ROLL Flash, Figure 4 in miniature).
Four updates a batch, as in the papers' runs (with one the clipped losses are the same), each of a quarter of the
recipe's learning rate, so that a version moves as far as the recipe's: what eight versions of delay cost depends on it.
Finished runs are kept in --keep FOLDER and not repeated. About 70 seconds a run on an idle core; `--quick` is one run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.form import Figure, main
from headrace.connectors.engines.engine import Generation, Request, generate
from headrace.connectors.engines.transformers import TransformersEngine
from headrace.connectors.model_folder import ModelFolder
from headrace.pipeline.rewards.exact_match import ExactMatch, ExactMatchOptions
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.workflow import sequence_of
from headrace.schemas.config import RunConfig, load_config
from headrace.schemas.parts import ManifestMember, Sampling
from headrace.schemas.records import Item, Manifest, Prompt
from headrace.trainers.backends.open import open_backend
from headrace.trainers.ranks import Ranks
from headrace.trainers.update import Learner

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "sort_digits"
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {}, "m2po": {}, "decoupled_ppo": {}, "tis": {"anchor": "behave", "correction": {"upper": 5.0}}, "cispo": {},
    "topr": {},
}  # fmt: skip
"""Loss plug-in -> its options where they are not its defaults: those of the paper for tis."""
DEPTHS, SEEDS, STEPS, UPDATES = (0, 2, 8), (0, 1), 300, 4
GROUPS, REPLICAS = 32, 8
HELD_OUT = 8
"""Samples of each held-out prompt, which bring the error of an accuracy to 0.01."""


def prompts_of(name: str) -> list[Prompt]:
    """Rows of one of the recipe's files."""
    lines = (RECIPE / name).read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        Prompt(
            prompt_id=str(at), stream="main", dataset=name, row=at, epoch=0, position=at, prompt=row["prompt"],
            answer=row["answer"],
        )
        for at, row in enumerate(rows)
    ]  # fmt: skip


class Sampler:
    """Completions and rewards of prompts under given weights."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder = ModelFolder(folder)
        self._engine = TransformersEngine(folder, slots=GROUPS * REPLICAS)
        self._reward = ExactMatch(ExactMatchOptions())
        self._sampling = Sampling(max_new_tokens=config.rollout.max_new_tokens)
        self._drawn = random.Random(config.run.seed)

    def load(self, weights: dict[str, npt.NDArray[Any]], version: int) -> None:
        """Sample with these weights from now on."""
        self._engine.load_weights(weights, version)

    def sample(self, prompts: Sequence[Prompt]) -> list[tuple[Prompt, npt.NDArray[np.int32], Sampling, Generation]]:
        """One completion of each."""
        requests = [
            Request(
                key=at,
                prompt=self._folder.encode(prompt),
                sampling=Sampling(max_new_tokens=self._sampling.max_new_tokens, seed=self._drawn.getrandbits(48)),
            )
            for at, prompt in enumerate(prompts)
        ]
        made = generate(self._engine, requests)
        return [(p, r.prompt, r.sampling, g) for p, r, g in zip(prompts, requests, made, strict=True)]

    def score(self, prompt: Prompt, generation: Generation) -> float:
        """Reward of a completion."""
        text = self._folder.decode(generation.tokens)
        return self._reward(prompt, Completion(text, generation.end_reason, generation.tokens))

    def accuracy(self, prompts: Sequence[Prompt]) -> float:
        """Mean reward."""
        return fmean(self.score(p, g) for p, _, _, g in self.sample(prompts))


def batch_of(sampler: Sampler, prompts: Sequence[Prompt], batch: int) -> tuple[list[Item], Manifest]:
    """A batch of whole groups, as the stage ``batch`` makes one."""
    rows = sampler.sample([prompt for prompt in prompts for _ in range(REPLICAS)])
    items = [
        item
        for group in range(len(prompts))
        for item in items_of(sampler, rows[group * REPLICAS : (group + 1) * REPLICAS], batch, group)
    ]
    return items, manifest_of(items, batch)


def items_of(sampler: Sampler, rows: Sequence[Any], batch: int, group: int) -> list[Item]:
    """Items of one group."""
    rewards = [sampler.score(p, g) for p, _, _, g in rows]
    out = []
    for replica, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        prompt, tokens, sampling, generation = row
        sequence = sequence_of(0, "policy", tokens, generation, sampling)
        out.append(
            Item(
                policy=0, batch=batch, lane=0, index=group * REPLICAS + replica, use=0, group=group, replica=replica,
                stream="main", prompt_id=prompt.prompt_id, raw_reward=reward, shaped_reward=reward,
                group_mean=fmean(rewards), group_std=stdev(rewards), group_count=REPLICAS,
                length=int(generation.tokens.size), oldest_version=sequence.oldest_version,
                newest_version=sequence.newest_version, end_reason=generation.end_reason, sequences=[sequence],
            )
        )  # fmt: skip
    return out


def manifest_of(items: Sequence[Item], batch: int) -> Manifest:
    """The global counts of a batch."""
    return Manifest(
        policy=0, batch=batch, start_version=batch - 1, since_version=0, fresh_groups=GROUPS, replayed_groups=0,
        tokens=sum(int(s.mask.sum()) for item in items for s in item.sequences), sequences=len(items),
        trajectories=len(items), groups=GROUPS, composed_ms=0,
        members=[
            ManifestMember(group=i.group, replica=i.replica, use=0, lane=0, oldest_version=i.oldest_version)
            for i in items
        ],
    )  # fmt: skip


def learn(loss: str, depth: int, seed: int, steps: int, warm: Path) -> dict[str, float]:
    """One run; returns accuracies, the largest staleness trained on, and seconds."""
    began = time.monotonic()
    rate = load_config([RECIPE / "run.toml"]).trainer.lr / UPDATES
    chosen = [f"trainer.loss_options.{key}={value}" for key, value in flat(LOSSES[loss])]
    config = load_config(
        [RECIPE / "run.toml"],
        [f"run.seed={seed}", "trainer.backend=torch", f"trainer.loss={loss}", f"policies.main.depth={depth}", *chosen,
         f"policies.main.model={warm}", f"trainer.updates_per_batch={UPDATES}", f"trainer.lr={rate}"],
    )  # fmt: skip
    train, held_out = prompts_of("train.jsonl"), prompts_of("eval.jsonl") * HELD_OUT
    sampler = Sampler(warm, config)
    ranks = Ranks()
    backend = open_backend(config.trainer_of("main"), str(warm), ranks)
    learner = Learner(config, "main", backend, ranks)
    recent = deque([(0, copied(backend.weights()))], maxlen=depth + 1)
    sampler.load(recent[0][1], 0)
    start, oldest = sampler.accuracy(held_out), 0
    order = random.Random(seed)
    for step in range(1, steps + 1):
        version, weights = recent[0]
        sampler.load(weights, version)
        items, manifest = batch_of(sampler, order.sample(train, GROUPS), step)
        learner.train(items, manifest, step - 1)
        recent.append((step, copied(backend.weights())))
        oldest = max(oldest, step - 1 - version)
    sampler.load(recent[-1][1], steps)
    return {
        "accuracy_start": start, "accuracy_final": sampler.accuracy(held_out), "staleness": oldest,
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def flat(options: dict[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested options."""
    for key, value in options.items():
        if isinstance(value, dict):
            yield from flat(value, f"{under}{key}.")
        else:
            yield under + key, value


def copied(weights: Any) -> dict[str, npt.NDArray[Any]]:
    """Published weights that a later step does not change."""
    return {name: array.copy() for name, array in weights.items()}


def warm_start(folder: Path, seed: int) -> Path:
    """The model that runs of this seed start from."""
    out = folder / f"warm-{seed}"
    if not (out / "config.json").exists():
        command = [sys.executable, str(RECIPE / "warm_start.py"), "--out", str(out), "--seed", str(seed)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """Run what is missing and tell the table."""
    todo = list(product(given.seeds, given.depths, given.losses))
    if given.quick:
        todo = todo[:1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        done: dict[tuple[str, int], list[dict[str, float]]] = {}
        for seed, depth, name in todo:
            steps = 10 if given.quick else given.batches
            kept = folder / f"{name}-d{depth}-s{seed}-{steps}.json"
            if not kept.exists():
                kept.write_text(json.dumps(learn(name, depth, seed, steps, warm_start(folder, seed))), "utf-8")
            run = json.loads(kept.read_text("utf-8"))
            print(f"{kept.stem}: " + ", ".join(f"{k} {v:.3f}" for k, v in run.items()), file=sys.stderr)
            done.setdefault((name, depth), []).append(run)
    for (name, depth), runs in done.items():
        final = [run["accuracy_final"] for run in runs]
        spread = f", deviation over {len(runs)} seeds {pstdev(final):.3f}" if len(runs) > 1 else ""
        yield Figure(f"{name}_d{depth}_accuracy", fmean(final), anchor=f"staleness {runs[0]['staleness']:.0f}{spread}")
    for (name, depth), runs in done.items():
        if depth and (name, 0) in done:
            lost = fmean(r["accuracy_final"] for r in done[name, 0]) - fmean(r["accuracy_final"] for r in runs)
            yield Figure(
                f"{name}_d{depth}_lost", lost, target=0.06, at_least=False, anchor="less than the same loss at d 0"
            )
    gains = [r["accuracy_final"] / max(r["accuracy_start"], 1e-9) for runs in done.values() for r in runs]
    yield Figure("least_gain", min(gains), "x", target=None if given.quick else 2.0, anchor="the warm start's accuracy")


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds of model, prompts and samples")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS), help="staleness in versions")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES), help="losses to compare")
    parser.add_argument("--batches", type=int, default=STEPS, help="batches a run")
    parser.add_argument("--keep", default="", metavar="FOLDER", help="keep finished runs here, and reuse them")


if __name__ == "__main__":
    main(__doc__, measure, options)
