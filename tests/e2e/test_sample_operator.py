"""An operator of a package of its own changes a real run by one line, and is named wherever a person looks."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from threading import Event, Thread

import pytest
from tiny_run import HEADRACE, headrace, tiny_config

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(600)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def scrape(port: int, seen: list[str], over: Event) -> None:
    """What the operators show to Prometheus while they run; the newest answer stays."""
    while not over.is_set():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
                text = answer.read().decode()
            if "reward_deviation" in text:
                seen[:] = [text]
        except OSError:
            pass
        time.sleep(0.2)


def test_it_is_in_the_list_the_metrics_the_trace_and_the_report(tmp_path: Path, tiny_model: Path) -> None:
    target = tmp_path / "site"
    shutil.copytree(ROOT / "docs" / "sample_operator", tmp_path / "package")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(tmp_path / "package")], check=True, capture_output=True)
    config = tiny_config(tmp_path, tiny_model, "sample")
    port = free_port()
    path = os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH", ""))))
    seen: list[str] = []
    over = Event()
    watcher = Thread(target=scrape, args=(port, seen, over))
    watcher.start()
    try:
        words = ("run", "@", str(config), 'operators=[{type="reward_scale", after=2}]')
        done = headrace(*words, PYTHONPATH=path, HEADRACE_METRICS_PORT=str(port))
    finally:
        over.set()
        watcher.join()
    assert done.returncode == 0, done.stdout
    folder = str(tmp_path / "sample")

    listed = headrace("operators", "list", "--format", "json", PYTHONPATH=path)
    rows = {row["name"]: row["distribution"] for row in json.loads(listed.stdout) if row["kind"] == "operators"}
    assert rows["reward_scale"] == "headrace-reward-scale"
    assert seen and 'headrace_reward_deviation{stage="assemble"}' in seen[0], "it shows its own figure"
    report = subprocess.run(
        [HEADRACE, "report", folder, "--format", "json"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert json.loads(report.stdout)["operators"] == {"reward_scale": "shape, of headrace-reward-scale"}
    traced = headrace("trace", _first_prompt(folder), "--folder", folder, PYTHONPATH=path)
    assert "kept by reward_scale: mean reward " in traced.stdout, traced.stdout
    verified = headrace("verify", folder, PYTHONPATH=path)
    assert verified.returncode == 0, verified.stdout


def _first_prompt(folder: str) -> str:
    """The id of the prompt of the first group."""
    told = headrace("topics", "cat", "admissions", "--folder", folder, "--format", "json").stdout
    found = re.search(r'"prompt_id": "([^"]+)"', told)
    assert found is not None, told
    return found[1]
