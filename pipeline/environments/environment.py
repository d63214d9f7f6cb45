"""The contract of an environment: text observations in, text actions out, every episode decided by its seed.

A workflow drives it: ``reset``, then ``step`` until ``done``, then ``close``. An environment holds one episode at a
time and keeps nothing outside itself, so that a hung one can be killed with its process and replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headrace.schemas.records import Prompt

__all__ = ("Environment", "Observation")


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows: text for the policy, reward of the last action, whether the episode has ended."""

    text: str
    reward: float = 0.0
    done: bool = False
    details: Mapping[str, str] = field(default_factory=dict)


class Environment(Protocol):
    """One episode at a time."""

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """Begin an episode; equal seed and prompt give the equal episode."""
        ...

    def step(self, action: str) -> Observation:
        """Act. Calling it after ``done`` raises ValueError."""
        ...

    def close(self) -> None:
        """Free what the episode holds; may be called twice."""
        ...
