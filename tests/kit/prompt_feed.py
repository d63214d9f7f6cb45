"""Prompts and outcomes for tests of operators before rollout, and a context that keeps what became of them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from headrace.pipeline.operators.prompt_operator import Candidate, Outcome, PromptOperator
from headrace.pipeline.runtime.driver import Counts
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.schemas.records import Prompt


def make_offer(name: str = "p", position: int = 0, *, in_flight: int = 0, **more: Any) -> Candidate:
    """A prompt of the stream ``main`` by its id; ``more`` are other fields of it."""
    fields = {"stream": "main", "dataset": "none", "row": 0, "epoch": 0, "prompt": "?", **more}
    return Candidate(prompt=Prompt(prompt_id=name, position=position, **fields), in_flight=in_flight)


class PromptFeed:
    """The context of one operator over a store in memory; ``made`` makes it anew from that store, as a restart does."""

    def __init__(self, operator: Any, configuration: Any = None, *, seed: int = 0) -> None:
        self.metrics = Counts()
        self.memory = MemoryStore()
        self.seed = seed
        self.ended: list[Any] = []
        self._make = lambda: operator(configuration or operator.Configuration())
        self.operator: Any = None
        self.restart()

    def restart(self) -> None:
        """Go on with a new operator and the same store."""
        made: PromptOperator = self._make()
        made.open(self)
        self.operator = made

    def store(self) -> StoreView:
        return StoreView(self.memory, b"s")

    def admit(self) -> None:
        self.ended.append("")

    def drop(self, reason: str, detail: str) -> None:
        assert reason.isidentifier() and detail
        self.ended.append(reason)

    def offer(self, candidate: Candidate | str, position: int = 0) -> str:
        """The reason for which a prompt is dropped; empty when it becomes a group, of which the operator is told."""
        offered = make_offer(candidate, position) if isinstance(candidate, str) else candidate
        self.operator.process(offered, self)
        (ended,) = self.ended
        self.ended.clear()
        if not ended:
            self.operator.admitted(offered, self)
        return str(ended)

    def learn(self, name: str, rewards: Many[float], *, complete: bool = True) -> None:
        """A group of a prompt has closed."""
        prompt = make_offer(name).prompt
        self.operator.outcome(Outcome(group=0, prompt=prompt, rewards=tuple(rewards), complete=complete), self)

    def move(self, versions: int = 1) -> None:
        """New versions."""
        for version in range(1, versions + 1):
            self.operator.moved(version, self)
