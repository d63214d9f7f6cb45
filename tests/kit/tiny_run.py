"""The smallest whole run: a model of 0.1M weights, four prompts, two versions; `headrace run` as a person starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HEADRACE = str(Path(sys.executable).with_name("headrace"))


def tiny_config(folder: Path, model: Path, run: str, **sections: dict[str, Any]) -> Path:
    """Write the configuration and the data; `sections` add keys (kafka={...}). Returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{n}", "answer": str(n)}) + "\n" for n in range(4)))
    config: dict[str, dict[str, Any]] = {
        "run": {"id": run, "folder": str(folder), "group_partitions": 2, "inboxes": 2, "lanes": 2, "max_restarts": 1},
        "policies": {"main": {"model": str(model)}},
        "streams": {"main": {"dataset": str(data), "group_size": 2}},
        "rollout": {"slots": 8, "max_new_tokens": 4},
        "trainer": {"backend": "torch", "precision": "fp32", "batch_groups": 2, "max_steps": 2, "lr": 1e-4},
    }
    for name, keys in sections.items():
        config.setdefault(name, {}).update(keys)
    file = folder / f"{run}.json"
    file.write_text(json.dumps(config))
    return file


def headrace(*words: str, seconds: float = 400.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end; standard output and error come together."""
    import os

    return subprocess.run(
        [HEADRACE, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        timeout=seconds, check=False, env={**os.environ, **environment},
    )  # fmt: skip
