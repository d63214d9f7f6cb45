"""A log gets a line every few seconds and the last figures; messages come at once."""

from __future__ import annotations

import pytest

from headrace.pipeline.launch.display import PlainDisplay, display_for


def test_figures_come_every_few_seconds_and_once_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(every_seconds=60)
    for number in range(3):
        display.update([f"v{number}"])
        display.note(f"message {number}")
    display.close()
    display.close()
    assert capsys.readouterr().out.split("\n") == ["v0", "message 0", "message 1", "message 2", "v2", ""]


def test_a_terminal_shows_a_block_and_keeps_its_last_figures(capsys: pytest.CaptureFixture[str]) -> None:
    display = display_for(terminal=True)
    display.update(["main v1  reward 0.5"])
    display.note("worker [died]")
    display.close()
    out = capsys.readouterr().out
    assert "worker [died]" in out and "reward 0.5" in out
