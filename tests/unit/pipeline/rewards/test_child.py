"""Frames between the pool and its processes: whole values in order, whatever the pieces they arrive in."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline.rewards.child import take_frame, write_frame
from headrace.pipeline.rewards.reward import Completion
from headrace.schemas.records import Prompt

PROMPT = Prompt(prompt_id="1", stream="main", dataset="d", row=0, epoch=0, position=0, prompt="21=", answer="12")
VALUES = st.one_of(st.none(), st.text(), st.floats(allow_nan=False), st.lists(st.integers()), st.binary(max_size=300))


def framed(*values: Any) -> bytes:
    stream = io.BytesIO()
    for value in values:
        write_frame(stream, value)
    return stream.getvalue()


@settings(max_examples=60, deadline=None)
@given(values=st.lists(VALUES, max_size=6), cut=st.integers(1, 40))
def test_values_come_out_whole_and_in_order(values: list[Any], cut: int) -> None:
    data, buffer, found = framed(*values), bytearray(), []
    for at in range(0, len(data), cut):
        buffer += data[at : at + cut]
        while (frame := take_frame(buffer)) is not None:
            found.append(frame[0])
    assert found == values
    assert not buffer, "nothing is left behind"


def test_a_frame_is_not_taken_before_its_last_byte() -> None:
    data = framed({"a": 1.5})
    for length in range(len(data)):
        buffer = bytearray(data[:length])
        assert take_frame(buffer) is None
        assert bytes(buffer) == data[:length], "what is there stays"
    assert take_frame(bytearray(data)) == ({"a": 1.5},)


def test_a_value_of_none_is_told_from_no_value() -> None:
    assert take_frame(bytearray(framed(None))) == (None,)
    assert take_frame(bytearray(struct.pack("<I", 0)[:3])) is None


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    (tmp_path / "child_rewards.py").write_text(
        "import os, sys\n"
        "def loud(p, c):\n"
        "    print('to standard output'); sys.stdout.flush()\n"
        "    return len(c.tokens)\n"
        "def huge(p, c): return 10 ** 400\n"
        "def dies(p, c): os._exit(7)\n"
        "def quits(p, c): sys.exit(7)\n"
        "def odd(p, c): raise ValueError('bad \\ud800 text')\n"
    )
    return tmp_path


def answers(rewards: Path, frames: int, *names: str) -> tuple[list[Any], int]:
    """The first frames of a process that is given one call of each name, and its exit status once its input closed."""
    done = Completion("ab", "stop", np.array([4, 5, 2], np.int32))
    calls = [(name if name == "exact_match" else f"child_rewards:{name}", {}, PROMPT, done) for name in names]
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.pipeline.rewards.child"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(rewards)},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    for call in calls:
        write_frame(process.stdin, call)
    buffer, found = bytearray(), []
    while len(found) < frames and (data := os.read(process.stdout.fileno(), 1 << 16)):
        buffer += data
        while (frame := take_frame(buffer)) is not None:
            found.append(frame[0])
    if len(found) < frames:
        process.wait(20)  # it ends by itself; with its input closed meanwhile it would end as one that is not needed
    process.stdin.close()
    process.stdout.close()
    return found, process.wait(20)


def test_a_process_answers_every_call_and_ends_with_its_input(rewards: Path) -> None:
    found, status = answers(rewards, 9, "loud", "huge", "odd", "missing", "exact_match")
    assert found[:2] == [None, ({"child_rewards:loud": 3.0}, "")], "what rewards print is no frame"
    assert found[2] is None and "too large for a float" in found[3][1], "the process goes on"
    assert found[4] is None and found[5][0] == {} and "bad \ud800 text" in found[5][1]
    assert "missing" in found[6][1], "one that cannot be loaded is answered without None"
    assert found[7:] == [None, ({"exact_match": 0.0}, "")]
    assert status == 0


def test_a_reward_that_exits_is_answered_for_and_one_that_dies_is_not(rewards: Path) -> None:
    found, status = answers(rewards, 2, "quits")
    assert found[1] == ({}, "reward child_rewards:quits raised SystemExit: 7") and status == 0
    found, status = answers(rewards, 2, "dies")
    assert (found, status) == ([None], 7)
