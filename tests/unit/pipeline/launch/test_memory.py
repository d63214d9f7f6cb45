"""Memory of processes is that of all of them with their children, and those that ended count nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.pipeline.launch.memory import MemorySampler, descendants, memory_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no /proc here")
HOLD = "import sys; held = bytearray(int(sys.argv[1])); print('ready', flush=True); sys.stdin.read()"
WITH_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {HOLD!r}, sys.argv[1]], stdin=sys.stdin, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
SIZE = 64 << 20


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process and its child, which holds 64 MiB."""
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_CHILD, str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.communicate(timeout=20)


def test_children_are_found_once(family: tuple[int, int]) -> None:
    parent, child = family
    assert descendants([parent]) == {parent, child} == descendants([parent, child, parent])
    assert {parent, child} <= descendants([os.getpid()])


def test_what_a_child_holds_counts(family: tuple[int, int]) -> None:
    parent, child = family
    alone, kind = memory_of([parent])
    both, _ = memory_of(descendants([parent]))
    assert kind == "pss"
    assert both - alone > SIZE
    assert memory_of([child])[0] > SIZE


def test_processes_that_have_ended_count_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(20)
    assert memory_of([process.pid]) == (0, "pss")
    assert memory_of([]) == (0, "pss")
    assert descendants([]) == set()


def test_a_sampler_keeps_the_peak_and_ends_at_once(family: tuple[int, int]) -> None:
    sampler = MemorySampler(lambda: [family[0]]).start()
    sampler.stop()
    assert sampler.peak_bytes > SIZE and sampler.kind == "pss"
