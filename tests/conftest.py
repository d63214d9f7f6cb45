"""What every test run prints at its end: seconds by folder, so that a slow one is seen before it hurts."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seconds spent in each test folder, slowest first, when more than one was run."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(Path(report.location[0]).parts[:2])] += report.duration
    if len(seconds) > 1:
        terminalreporter.write_sep("-", "seconds by folder")
        for folder, spent in sorted(seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{spent:8.1f}  {folder}")
