"""Operators before rollout that each break one promise, for tests of the kit that shall find them."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

from headrace.pipeline.operators.prompt_operator import Candidate, Outcome, PromptContext, PromptOperator


class Passing(PromptOperator):
    def __init__(self, configuration: Any) -> None:
        self.seen = 0


class Forgetful(Passing):
    """Counts in memory only."""

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        self.seen += 1
        context.drop("odd", f"{self.seen} seen") if self.seen % 2 else context.admit()


class Random(Passing):
    draws: ClassVar[Any] = itertools.count()

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        context.drop("draw", f"number {next(self.draws)}")


class Rewriting(Passing):
    def open(self, context: PromptContext) -> None:
        context.store().put(b"opened", str(int(context.store().get(b"opened") or 0) + 1).encode())


class Hoarding(Passing):
    def outcome(self, outcome: Outcome, context: PromptContext) -> None:
        context.store().put(f"group/{outcome.group}".encode(), bytes(100))


class Nameless(Passing):
    def process(self, candidate: Candidate, context: PromptContext) -> None:
        context.drop("", "")


class Raising(Passing):
    def process(self, candidate: Candidate, context: PromptContext) -> None:
        raise ZeroDivisionError("nothing to divide by")


class RaisingLater(Passing):
    def outcome(self, outcome: Outcome, context: PromptContext) -> None:
        raise ZeroDivisionError("nothing to divide by")


class Undecided(Passing):
    def process(self, candidate: Candidate, context: PromptContext) -> None:
        self.seen += 1


class Twice(Passing):
    def process(self, candidate: Candidate, context: PromptContext) -> None:
        context.admit()
        context.admit()
