"""vLLM's processes end with the worker that started them, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

WORKER = """
import time
from headrace.connectors.engines.vllm_worker import WeightWorker
WeightWorker().follow_owner({owner})
print("following", flush=True)
time.sleep(600)
"""
CORE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {worker!r}])
time.sleep(600)
"""
OWNER = """
import os, subprocess, sys, time
worker = sys.argv[1].format(owner=os.getpid())
code = sys.argv[2].format(worker=worker) if len(sys.argv) > 2 else worker
subprocess.Popen([sys.executable, "-c", code])
time.sleep(600)
"""


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _killed(*scripts: str) -> list[psutil.Process]:
    """Start an owner above these processes, kill it with -9, and say which of them go on."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *scripts], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "following\n"
        processes = psutil.Process(owner.pid).children(recursive=True)
        assert len(processes) == len(scripts)
        owner.kill()
        owner.wait(10)
        until = time.monotonic() + 20
        while any(map(_runs, processes)) and time.monotonic() < until:
            time.sleep(0.05)
        left = [process for process in processes if _runs(process)]
        for process in left:
            process.kill()
        return left
    finally:
        owner.kill()


def test_a_worker_and_the_core_above_it_end_with_the_owner() -> None:
    assert _killed(WORKER, CORE) == []


def test_a_worker_right_below_the_owner_ends_alone() -> None:
    assert _killed(WORKER) == []
