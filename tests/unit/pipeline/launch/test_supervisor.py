"""Real processes under supervision: restarts, giving up with the reason, stopping, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.pipeline.launch.parts import Part
from headrace.pipeline.launch.supervisor import PartFailed, PartMisconfigured, Supervisor

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def part(code: str, name: str = "worker", role: str = "rollout") -> Part:
    return Part(name=name, role=role, command=(sys.executable, "-c", code))


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "logs", max_restarts=2, window_seconds=60)
    yield made
    made.stop(made.all_names(), grace_seconds=0.1)


def until(condition: Callable[[], object], supervisor: Supervisor, seconds: float = 20.0) -> list[str]:
    """Keep checking until a condition holds; returns the messages."""
    messages: list[str] = []
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s; messages {messages}"
        messages += supervisor.check()
        time.sleep(0.01)
    return messages


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def log_text(supervisor: Supervisor, name: str = "worker") -> str:
    path = supervisor.log_of(name)
    return path.read_text() if path.exists() else ""


def test_a_part_that_ends_well_is_finished_and_not_started_again(supervisor: Supervisor) -> None:
    supervisor.start(part("print('done')"))
    messages = until(lambda: not supervisor.running(), supervisor)
    assert messages == ["worker has finished"]
    assert log_text(supervisor) == "done\n" and supervisor.troubled() == {}


def test_a_dead_part_is_started_again_under_its_name(supervisor: Supervisor, tmp_path: Path) -> None:
    once = tmp_path / "died"
    code = f"import pathlib, sys; p = pathlib.Path({str(once)!r})\nif not p.exists(): p.touch(); sys.exit(3)\n" + WAITS
    supervisor.start(part(code))
    messages = until(lambda: "up" in log_text(supervisor), supervisor)
    assert "ended with exit code 3; starting it again" in messages[0]
    assert supervisor.running("rollout") == ["worker"] and supervisor.troubled() == {"worker": 1}


def test_after_too_many_deaths_it_gives_up_with_the_end_of_the_log(supervisor: Supervisor) -> None:
    supervisor.start(part("raise SystemExit('the disk is full')"))
    with pytest.raises(PartFailed, match=r"(?s)3 deaths in 60 s.*the disk is full"):
        until(lambda: False, supervisor)


@pytest.mark.parametrize(("code", "told"), [(78, "exit code 78"), (1, "exit code 1")])
def test_a_run_goes_on_without_what_looks_after_its_store(supervisor: Supervisor, code: int, told: str) -> None:
    supervisor.start(part(f"print('no right to delete', flush=True); raise SystemExit({code})", "prune", "upkeep"))
    messages = until(lambda: not supervisor.running(), supervisor)
    assert f"{told} and is not started again; the run goes on" in messages[-1]
    assert "no right to delete" in messages[-1]


def test_a_death_is_told_with_the_last_thing_that_was_said(supervisor: Supervisor) -> None:
    supervisor.start(part("print('the store is away'); print(); raise SystemExit(1)"))
    messages = until(lambda: supervisor.troubled(), supervisor)
    assert messages == ["worker ended with exit code 1: the store is away; starting it again in 0.2 s (1 of 2)"]


def test_the_reason_of_a_rank_counts_and_not_what_torchrun_says_after_it(supervisor: Supervisor) -> None:
    account = "".join(f"  noise {n}\n" for n in range(30)) + "Root Cause (first observed failure):\n[0]:\n"
    account += "  time      : now\n  exitcode  : 78 (pid: 11412)\n"
    supervisor.start(part(f"print('configuration error: no such loss'); print({account!r}); raise SystemExit(1)"))
    with pytest.raises(PartMisconfigured, match=r"(?s)exit code 78.*would not help.*configuration error: no such loss"):
        until(lambda: False, supervisor)


@pytest.mark.parametrize("code", [75, 78])
def test_a_configuration_error_or_a_successor_is_not_tried_again(supervisor: Supervisor, code: int) -> None:
    supervisor.start(part(f"import sys; print('unknown reward', flush=True); sys.exit({code})"))
    with pytest.raises(PartFailed, match=r"(?s)would not help.*unknown reward"):
        until(lambda: False, supervisor)
    assert supervisor.troubled() == {}


def test_deaths_outside_the_window_are_forgotten(tmp_path: Path) -> None:
    now = [0.0]
    supervisor = Supervisor(tmp_path, max_restarts=1, window_seconds=10, clock=lambda: now[0])
    supervisor.start(part("raise SystemExit(1)"))
    for _ in range(3):
        until(lambda: supervisor.troubled(), supervisor)
        now[0] += 11
        assert supervisor.troubled() == {}
    supervisor.stop(["worker"], grace_seconds=1)


def test_parts_notice_by_their_pipe_that_the_launcher_was_killed(tmp_path: Path) -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read(); print('pipe closed', flush=True)"
    launcher = f"""
import pathlib, sys, time
from headrace.pipeline.launch.parts import Part
from headrace.pipeline.launch.supervisor import Supervisor
s = Supervisor(pathlib.Path({str(tmp_path)!r}), max_restarts=1, window_seconds=60)
s.start(Part(name="worker", role="rollout", command=(sys.executable, "-c", {code!r})))
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher])
    log = tmp_path / "worker.log"
    wait_for(lambda: log.exists() and "up" in log.read_text())
    process.kill()
    process.wait()
    wait_for(lambda: "pipe closed" in log.read_text())


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


def test_one_part_does_not_hold_the_pipe_of_another(supervisor: Supervisor, tmp_path: Path) -> None:
    for name in ("first", "second"):
        supervisor.start(part(WAITS, name))
    until(lambda: all("up" in log_text(supervisor, n) for n in ("first", "second")), supervisor)
    first, second = supervisor.pids()
    open_pipes = [{str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir()} for pid in (first, second)]
    shared = {name for name in open_pipes[0] & open_pipes[1] if name.startswith("pipe:")}
    assert shared == set()


def test_stop_kills_what_does_not_listen_with_its_children(supervisor: Supervisor, tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {IGNORES!r}])\n"
    code += f"open({str(child)!r}, 'w').write(str(c.pid)); " + IGNORES
    supervisor.start(part(code))
    until(lambda: log_text(supervisor).count("up") == 2, supervisor)
    pids = [*supervisor.pids(), int(child.read_text())]
    assert supervisor.stop(["worker"], grace_seconds=0.2) == ["worker"]
    end = time.monotonic() + 5
    while any(map(alive, pids[:1])) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(pids[0])
    assert _gone_or_zombie(pids[1])


def _gone_or_zombie(pid: int) -> bool:
    """The child was adopted by init, which may not have reaped it yet."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_an_orderly_stop_kills_nobody(supervisor: Supervisor) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True)\n"
    supervisor.start(part(code + "import time; time.sleep(60)"))
    until(lambda: "up" in log_text(supervisor), supervisor)
    assert supervisor.stop(["worker"], grace_seconds=10) == []
    assert supervisor.running() == []


def test_the_next_start_takes_a_replaced_command(supervisor: Supervisor) -> None:
    supervisor.start(part("raise SystemExit(1)"))
    supervisor.replace(part("print('second form')"))
    until(lambda: not supervisor.running(), supervisor)
    assert "second form" in log_text(supervisor)


def test_what_parts_say_that_they_wait_for_can_be_asked(supervisor: Supervisor) -> None:
    waits = "print('12:00:00 waiting for the object store: s3://b: refused', flush=True)"
    supervisor.start(part(f"{waits}; {WAITS}; ", "busy"))
    supervisor.start(part(f"import sys; {waits}; sys.stdin.read()", "waits"))
    kafka = waits.replace("the object store: s3://b", "Kafka at k:9092")
    supervisor.start(part(f"import sys; {kafka}; sys.stdin.read()", "starts"))
    until(lambda: "refused" in supervisor.log_of("waits").read_text(), supervisor)
    until(lambda: "refused" in supervisor.log_of("starts").read_text(), supervisor)
    until(lambda: "up" in supervisor.log_of("busy").read_text(), supervisor)
    assert supervisor.waiting() == {
        "waits": "12:00:00 waiting for the object store: s3://b: refused",
        "starts": "12:00:00 waiting for Kafka at k:9092: refused",
    }


def test_a_part_that_ended_well_too_early_can_be_revived(supervisor: Supervisor, tmp_path: Path) -> None:
    once = tmp_path / "ended"
    code = (
        f"import pathlib; p = pathlib.Path({str(once)!r})\nif not p.exists(): p.touch(); raise SystemExit(0)\n" + WAITS
    )
    supervisor.start(part(code))
    until(lambda: not supervisor.running(), supervisor)
    assert supervisor.finished(for_seconds=60) == []
    (early,) = supervisor.finished(for_seconds=0)
    assert "starting it again" in supervisor.revive(early.name)
    until(lambda: "up" in log_text(supervisor), supervisor)
    assert supervisor.finished(for_seconds=0) == [] and supervisor.troubled() == {"worker": 1}
