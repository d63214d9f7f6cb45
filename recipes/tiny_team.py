"""What the recipes with several policies share, and the loop by which tool_agent is shown its demonstrations too.

Each role is a random model of the kind of recipes/sort_digits and learns from demonstrations for a few seconds. A share
of them is wrong on purpose, so that every role is right sometimes and has something to learn. Offline and repeatable.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

CHARACTERS = '0123456789=+-*/()<>.,:;?! \n[]{}"xabcdefghijklmnopqrstuvwyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
BATCH = 64
WARMUP = 40

Demonstrate = Callable[[random.Random], tuple[str, str]]
"""Draws a prompt and what the role says to it."""


def sort_digits() -> Any:
    """The warm start of recipes/sort_digits: its tokenizer, model and batches are used here too."""
    file = Path(__file__).parent / "sort_digits" / "warm_start.py"
    spec = importlib.util.spec_from_file_location("sort_digits_warm_start", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fit(model: Any, batches: Callable[[], Any], steps: int, learning_rate: float) -> float:
    """SFT in place on ``steps`` batches of token ids and labels (-100 where nothing is learned); the last loss."""
    last = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (1 - 0.9 * step / steps)
    )
    for _ in range(steps):
        ids, labels = batches()
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        last = loss.item()
    return last


def make_policy(
    base: Any, tokenizer: Any, demonstrate: Demonstrate, *, steps: int, seed: int, learning_rate: float
) -> tuple[Any, float]:
    """A model after ``steps`` batches of demonstrations, and the last loss."""
    torch.manual_seed(seed)
    rng, model = random.Random(seed), base.make_model(tokenizer)

    def shown() -> Any:
        return base.batch_of([demonstrate(rng) for _ in range(BATCH)], tokenizer)

    return model, fit(model, shown, steps, learning_rate)


def main(roles: Mapping[str, Demonstrate], steps: int, learning_rate: float = 2e-3) -> None:
    """Write a model for each role to ``--out``/ROLE. The folder appears in one piece."""
    parser = argparse.ArgumentParser(description="Make the models that the run starts from.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps)
    given = parser.parse_args()
    torch.set_num_threads(1)
    base, began = sort_digits(), time.monotonic()
    tokenizer = base.make_tokenizer(CHARACTERS)
    unfinished, told = given.out.with_name(given.out.name + ".unfinished"), []
    for number, (role, demonstrate) in enumerate(roles.items()):
        seed = 1000 * given.seed + number
        model, loss = make_policy(
            base, tokenizer, demonstrate, steps=given.steps, seed=seed, learning_rate=learning_rate
        )
        model.save_pretrained(unfinished / role)
        tokenizer.save_pretrained(unfinished / role)
        told.append(f"{role} {loss:.3f}")
    unfinished.rename(given.out)
    print(f"warm start: SFT loss {', '.join(told)}, {time.monotonic() - began:.1f} s")
