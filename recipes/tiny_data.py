"""Writes the datasets of the recipes with several policies: rows drawn without repetition, the same on any machine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

TRAIN, HELD_OUT = 512, 128


def write(folder: Path, problems: int, row: Callable[[int], dict[str, str]]) -> None:
    """``train.jsonl`` and ``eval.jsonl`` in a folder: rows of different numbers below ``problems``."""
    drawn = random.Random(20261130).sample(range(problems), TRAIN + HELD_OUT)
    for name, numbers in (("train", drawn[:TRAIN]), ("eval", drawn[TRAIN:])):
        lines = "".join(json.dumps(row(number)) + "\n" for number in numbers)
        (folder / f"{name}.jsonl").write_text(lines, "utf-8")
