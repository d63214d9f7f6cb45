"""A journal: small facts appended to one file, read back at start, rewritten when it has grown.

Each fact is a JSON array on one line, and it is with the operating system when `write` returns. A torn last line (a
process killed while writing) is cut off at start. The owner replays facts in order and gives `rewrite` the shortest
list that says the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from headrace.connectors.broker.storage import Storage

Fact = list[Any]
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class Journal:
    """One journal file; `live` tells how many facts a rewrite would keep, so that the file stays in proportion.

    `minimum` is the number of facts below which the file is never rewritten.
    """

    def __init__(
        self, storage: Storage, name: str, snapshot: Callable[[], Iterable[Fact]], minimum: int = 10_000
    ) -> None:
        self._storage = storage
        self._name = name
        self._snapshot = snapshot
        self._minimum = minimum
        self._file = storage.open(name)
        self._count = 0
        self._rewrite_at = minimum

    def replay(self) -> list[Fact]:
        """All whole facts, oldest first; cuts a torn tail off the file."""
        text = self._file.read(0, self._file.size)
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            self._file.truncate(whole)
        facts: list[Fact] = [json.loads(line) for line in text[:whole].splitlines()]
        self._count = len(facts)
        return facts

    def write(self, fact: Fact) -> None:
        """Append one fact; raises `StorageError` and keeps nothing of it when the disk refuses."""
        self._file.append(_encode(fact).encode("utf-8", "surrogatepass") + b"\n")
        self._count += 1

    def rewrite_if_grown(self) -> bool:
        """Replace the file by the owner's snapshot when most of it is history; returns whether it did.

        Raises `StorageError` when the new file cannot be written; the old one then stays in use.
        """
        if self._count < self._rewrite_at:
            return False
        temporary = self._name + ".new"
        self._storage.remove(temporary)
        fresh = self._storage.open(temporary)
        lines = [_encode(fact) for fact in self._snapshot()]
        if lines:
            fresh.append(("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))
        self._storage.rename(temporary, self._name)
        self._file = fresh
        self._count = len(lines)
        self._rewrite_at = max(self._minimum, 4 * len(lines))
        return True
