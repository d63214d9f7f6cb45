"""Progress on a terminal (one live block) or in a log (a line every few seconds), and messages between."""

import sys
import time
from typing import Protocol

__all__ = ("Display", "PlainDisplay", "TerminalDisplay", "display_for")

_PLAIN_SECONDS = 5.0


class Display(Protocol):
    """Where a launcher shows what happens."""

    def note(self, text: str) -> None:
        """A message that stays."""
        ...

    def update(self, lines: list[str]) -> None:
        """The newest figures, a line a policy; may be shown later or not at all."""
        ...

    def close(self) -> None:
        """Show the last figures; nothing follows but plain output."""
        ...


class PlainDisplay:
    """Lines on standard output, figures every few seconds and once at the end."""

    def __init__(self, every_seconds: float = _PLAIN_SECONDS) -> None:
        self._every = every_seconds
        self._shown_at = 0.0
        self._last: list[str] = []

    def note(self, text: str) -> None:
        """Print a message."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def update(self, lines: list[str]) -> None:
        """Print the figures when the last ones are old enough."""
        self._last = lines
        if time.monotonic() - self._shown_at >= self._every:
            self._print()

    def close(self) -> None:
        """Print figures that were held back."""
        if self._last:
            self._print()

    def _print(self) -> None:
        self._shown_at = time.monotonic()
        for line in self._last:
            self.note(line)
        self._last = []


class TerminalDisplay:
    """A block at the end of a terminal that is drawn anew; messages scroll above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def note(self, text: str) -> None:
        """Print a message above the block."""
        self._console.print(text, markup=False)

    def update(self, lines: list[str]) -> None:
        """Draw the figures, their parts one below the other."""
        from rich.text import Text

        self._live.update(Text("\n\n".join(line.replace("  ", "\n  ") for line in lines)))

    def close(self) -> None:
        """Leave the last figures on the screen."""
        self._live.stop()


def display_for(*, terminal: bool) -> Display:
    """The display for standard output."""
    return TerminalDisplay() if terminal else PlainDisplay()
