"""Acting on a balance report: bounds, a cool-down, and a user's command that makes the pool as large as it should be.

In: reports; out: what was done, in words. One command at a time; one that fails is tried again after the cool-down.
"""

import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.pipeline.balance import BalanceReport
from headrace.schemas.errors import ConfigurationError

__all__ = ("Actuator", "Bounds", "Command", "Scaler")

Actuator = Callable[[int, int, str], str]
"""(present size, wanted size, branch) -> "" when done, else what went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Sizes and pace that a pool is held to. ``most`` 0: no upper bound. ``step``: largest change at once, 0: any."""

    least: int = 1
    most: int = 0
    step: int = 0
    cool_down_seconds: float = 300.0

    def within(self, size: int, target: int) -> int:
        """The size nearest to ``target`` that is allowed from ``size``."""
        if self.step:
            target = max(size - self.step, min(size + self.step, target))
        return max(self.least, min(target, self.most) if self.most else target)


class Scaler:
    """Decides whether a report is acted on; ``now`` gives seconds."""

    def __init__(self, actuator: Actuator, bounds: Bounds, now: Callable[[], float] = time.monotonic) -> None:
        if bounds.most and bounds.most < bounds.least:
            raise ConfigurationError(f"the pool's least size {bounds.least} is above its largest {bounds.most}")
        self._actuator = actuator
        self._bounds = bounds
        self._now = now
        self._acted: float | None = None
        self._short_since: float | None = None

    def consider(self, report: BalanceReport) -> str:
        """Act on a report, or say why not."""
        wanted = self._bounds.within(report.size, report.target)
        outside = wanted != report.target
        if report.branch == "hold" and self._bounds.within(report.size, report.size) == report.size:
            return "hold"
        if wanted == report.size:
            return f"{report.branch} to {report.target} is outside the bounds" if outside else "hold"
        left = self._cooling()
        if left > 0:
            return f"cools down for {left:.0f} s more"
        self._acted = self._now()
        branch = "grow" if wanted > report.size else "shrink"
        error = self._actuator(report.size, wanted, branch)
        return f"failed: {error}" if error else f"{branch} from {report.size} to {wanted}"

    def keep(self, size: int) -> str:
        """Bring a pool back that has been below its least size for as long as the cool-down; what was done, or nothing.

        A pool without workers gives no reports that could be considered.
        """
        if size >= self._bounds.least:
            self._short_since = None
            return ""
        if self._short_since is None:
            self._short_since = self._now()
        if self._now() < self._short_since + self._bounds.cool_down_seconds or self._cooling() > 0:
            return ""
        self._acted = self._now()
        error = self._actuator(size, self._bounds.least, "grow")
        return f"failed: {error}" if error else f"grow from {size} to {self._bounds.least}"

    def _cooling(self) -> float:
        if self._acted is None:
            return 0.0
        return self._acted + self._bounds.cool_down_seconds - self._now()


class Command:
    """A command line as actuator: ``{target}``, ``{size}``, ``{delta}`` and ``{branch}`` in its words are replaced.

    It is run without a shell and waited for. Raises ConfigurationError for a line that cannot be split or is empty.
    """

    def __init__(self, line: str, timeout_seconds: float = 300.0) -> None:
        try:
            self._words = shlex.split(line)
        except ValueError as error:
            raise ConfigurationError(f"--apply {line!r} cannot be read as a command: {error}") from error
        if not self._words:
            raise ConfigurationError("--apply names no command")
        self._timeout = timeout_seconds

    def __call__(self, size: int, target: int, branch: str) -> str:
        """Run it; what went wrong, or nothing."""
        given = {"{target}": str(target), "{size}": str(size), "{delta}": f"{target - size:+d}", "{branch}": branch}
        words = [_filled(word, given) for word in self._words]
        try:
            done = subprocess.run(words, capture_output=True, timeout=self._timeout, check=False)
        except subprocess.TimeoutExpired:
            return f"{shlex.join(words)} did not end within {self._timeout:g} s"
        except OSError as error:
            return f"{shlex.join(words)}: {error.strerror}"
        if done.returncode:
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
            return f"{shlex.join(words)} ended with {done.returncode}: {said[-1] if said else 'it said nothing'}"
        return ""


def _filled(word: str, given: dict[str, str]) -> str:
    for mark, value in given.items():
        word = word.replace(mark, value)
    return word
