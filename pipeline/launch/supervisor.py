"""Processes of a run under supervision: started in their own groups, watched, started again with back-off, ended.

Each part has a pipe at its standard input whose end tells it that this process is gone (protocol 10), and a log file.
A death is answered by a restart; too many deaths in a window, a configuration error or a successor end the run with the
reason: the last lines of the part's log.
"""

import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.pipeline.launch.parts import Part
from headrace.schemas.errors import EXIT_CONFIGURATION, EXIT_FAILURE, EXIT_SUPERSEDED, ConfigurationError, HeadraceError

__all__ = ("PartFailed", "PartMisconfigured", "Supervisor")

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.2, 5.0
_OPTIONAL = "upkeep"
"""The role without which a run goes on."""
_LOG_LINES, _LOG_BYTES = 15, 40_000
_WAITS = re.compile("waiting for (the |Kafka )")
_REASONS = ("configuration error: ", "superseded: ")
"""How a process says what a restart does not cure (``lifetime.exit_with``)."""


class PartFailed(HeadraceError):
    """A part ended in a way that a restart does not cure, or died too often."""


class PartMisconfigured(PartFailed, ConfigurationError):
    """A part says that a person has to change something first."""


@dataclass(slots=True)
class _Child:
    """A part with its process, and what happened to it before."""

    part: Part
    process: subprocess.Popen[bytes] | None = None
    deaths: deque[float] = field(default_factory=deque)
    restart_at: float = 0.0
    finished: bool = False
    finished_at: float = 0.0
    log_start: int = 0
    groups: list[int] = field(default_factory=list)


class Supervisor:
    """Holds the parts of one run. Call ``check`` often; call ``stop`` at the end, whatever happened."""

    def __init__(
        self, logs: Path, *, max_restarts: int, window_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logs = logs
        self._max_restarts = max_restarts
        self._window = window_seconds
        self._clock = clock
        self._children: dict[str, _Child] = {}

    def log_of(self, name: str) -> Path:
        """The file that holds what a part printed."""
        return self._logs / f"{name}.log"

    def start(self, part: Part) -> None:
        """Start a part under supervision."""
        child = _Child(part)
        self._children[part.name] = child
        self._spawn(child)

    def replace(self, part: Part) -> None:
        """Use another command for the next start of a part of this name."""
        self._children[part.name].part = part

    def pids(self) -> list[int]:
        """Process ids of the parts that run (without children of their own)."""
        return [c.process.pid for c in self._children.values() if c.process is not None and c.process.poll() is None]

    def running(self, *roles: str) -> list[str]:
        """Names of parts (of these roles, all when none is named) that have not finished, dead ones included."""
        return [n for n, c in self._children.items() if not c.finished and (not roles or c.part.role in roles)]

    def troubled(self) -> dict[str, int]:
        """Parts that died within the window: name to number of deaths."""
        now = self._clock()
        counts = {n: sum(now - at < self._window for at in c.deaths) for n, c in self._children.items()}
        return {name: count for name, count in counts.items() if count}

    def waiting(self) -> dict[str, str]:
        """Parts whose last words are that they wait for something outside (a store, a broker): name to those words."""
        said = {n: self._said(c).rstrip().rpartition("\n")[2] for n, c in self._children.items() if not c.finished}
        return {name: line.strip()[:300] for name, line in said.items() if _WAITS.search(line)}

    def check(self) -> list[str]:
        """Notice ended parts and start them again when due; returns messages for people.

        Raises PartFailed when the run cannot go on.
        """
        messages: list[str] = []
        for child in self._children.values():
            if child.finished:
                continue
            if child.process is None:
                if self._clock() >= child.restart_at:
                    self._spawn(child)
                continue
            code = child.process.poll()
            if code is not None:
                messages.append(self._ended(child, code))
        return messages

    def finished(self, *, for_seconds: float) -> list[Part]:
        """Parts that ended well so long ago and were not started again."""
        before = self._clock() - for_seconds
        return [c.part for c in self._children.values() if c.finished and 0 < c.finished_at <= before]

    def revive(self, name: str) -> str:
        """Start a part again that ended well too early; counts as a death. Returns a message, raises PartFailed."""
        child = self._children[name]
        child.finished_at = 0.0
        return self._died(child, "ended although the run has not")

    def stop(self, names: Iterable[str], *, grace_seconds: float) -> list[str]:
        """Ask parts to end (SIGTERM), wait, kill what is left with its children; returns the names of those killed."""
        children = [self._children[n] for n in names if n in self._children]
        for child in children:
            child.finished = True
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + grace_seconds
        while time.monotonic() < end and any(c.process is not None and c.process.poll() is None for c in children):
            time.sleep(0.02)
        killed = [c.part.name for c in children if c.process is not None and c.process.poll() is None]
        for child in children:
            _kill_groups(child.groups)
            if child.process is not None:
                child.process.wait()
                _close(child.process)
        return killed

    def all_names(self) -> list[str]:
        """Every part that was started."""
        return list(self._children)

    def _spawn(self, child: _Child) -> None:
        log = self.log_of(child.part.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        child.log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            child.process = subprocess.Popen(
                child.part.command,
                env=child.part.full_environment(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child.groups.append(child.process.pid)

    def _ended(self, child: _Child, code: int) -> str:
        name = child.part.name
        code = _code_of_ranks(self._said(child)) or code if code == EXIT_FAILURE else code
        assert child.process is not None
        _close(child.process)
        _kill_groups(child.groups)
        if code == 0:
            child.finished, child.finished_at = True, self._clock()
            return f"{name} has finished"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code in (EXIT_CONFIGURATION, EXIT_SUPERSEDED):
            child.finished = True
            if child.part.role == _OPTIONAL:
                return self._without(child, how)
            error = PartMisconfigured if code == EXIT_CONFIGURATION else PartFailed
            raise error(f"{name} {how}, and starting it again would not help.\n{self._last_lines(child)}")
        return self._died(child, how)

    def _died(self, child: _Child, how: str) -> str:
        """Count a death and arrange the next start. Raises PartFailed after too many."""
        name, now = child.part.name, self._clock()
        child.deaths.append(now)
        while now - child.deaths[0] > self._window:
            child.deaths.popleft()
        count = len(child.deaths)
        if count > self._max_restarts:
            child.finished = True
            if child.part.role == _OPTIONAL:
                return self._without(child, how)
            raise PartFailed(
                f"{name} {how}: {count} deaths in {self._window:g} s (run.max_restarts is {self._max_restarts}).\n"
                f"{self._last_lines(child)}"
            )
        child.process, child.finished = None, False
        pause = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** (count - 1))
        child.restart_at = now + pause
        lines = self._said(child).split("\n") if how.startswith("ended with") else []
        last = next((f": {line.strip()[:300]}" for line in reversed(lines) if line.strip()), "")
        return f"{name} {how}{last}; starting it again in {pause:g} s ({count} of {self._max_restarts})"

    def _without(self, child: _Child, how: str) -> str:
        """What looks after the store is no reason to end a run."""
        return f"{child.part.name} {how} and is not started again; the run goes on.\n{self._last_lines(child)}"

    def _said(self, child: _Child) -> str:
        """The end of what a part printed since it was started last."""
        path = self.log_of(child.part.name)
        if not path.exists():
            return ""
        with path.open("rb") as log:
            log.seek(max(child.log_start, path.stat().st_size - _LOG_BYTES))
            return log.read().decode("utf-8", "replace")

    def _last_lines(self, child: _Child) -> str:
        """The reason that a part gave, or the end of its log when it gave none."""
        lines = self._said(child).rstrip().splitlines()
        reason = next((n for n, line in enumerate(lines) if line.startswith(_REASONS)), len(lines))
        lines = lines[reason:][:_LOG_LINES] or lines[-_LOG_LINES:]
        return "\n".join([f"The end of {self.log_of(child.part.name)}:", *(f"  {line}" for line in lines)])


def _code_of_ranks(text: str) -> int:
    """The exit code of the rank that failed first, from torchrun's account of it (torchrun itself ends with 1)."""
    first = re.search(r"Root Cause \(first observed failure\):.*?exitcode\s*: (\d+)", text, re.DOTALL)
    return int(first[1]) if first else 0


def _kill_groups(groups: list[int]) -> None:
    """Kill what is left of these process groups: a dead part's own children."""
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue
    groups.clear()


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        process.stdin.close()
