"""The mark of a process in the metadata of every offset commit: which instance wrote it, in which incarnation.

A process that lost its producer reads the marks to tell a successor (same instance, larger incarnation: it must exit)
from a transaction timeout (protocol 7). Incarnations grow with every start of an instance, also when the old marks were
overwritten by another instance, because they never lie below the wall clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.schemas.errors import Superseded

__all__ = ("Mark",)

_PREFIX = "hr1"


@dataclass(frozen=True, slots=True)
class Mark:
    """One process: its instance's name and its incarnation."""

    instance: str
    incarnation: int

    def __str__(self) -> str:
        return f"{_PREFIX} {self.instance} {self.incarnation}"

    @classmethod
    def parse(cls, metadata: str | None) -> "Mark | None":
        """The mark in an offset commit's metadata, None when it is none of ours."""
        parts = (metadata or "").split(" ")
        if len(parts) != 3 or parts[0] != _PREFIX or not parts[2].isdecimal():
            return None
        return cls(parts[1], int(parts[2]))

    @classmethod
    def next(cls, instance: str, seen: Iterable["Mark | None"], now_ms: int) -> "Mark":
        """The mark of a new process of the instance, above every mark seen of it."""
        before = [m.incarnation for m in seen if m is not None and m.instance == instance]
        return cls(instance, max([now_ms, *(n + 1 for n in before)]))

    def refuse_successor(self, seen: Iterable["Mark | None"]) -> None:
        """Raise Superseded when a later process of this instance has left its mark."""
        newest = max(
            (m.incarnation for m in seen if m is not None and m.instance == self.instance), default=self.incarnation
        )
        if newest > self.incarnation:
            raise Superseded(
                f"another process of instance {self.instance} has taken over (incarnation {newest}, this one is "
                f"{self.incarnation}); give every process that runs at once a name of its own"
            )
