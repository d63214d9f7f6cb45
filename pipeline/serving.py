"""The serving operators of one policy as ``batch`` uses them: who is refused, who is replayed, in which order, where.

In: the run's ``[[operators]]`` of the serving kinds; where none is named, ``staleness``, ``replay``, ``edf`` and
``batch`` as they are without settings. What a plug-in answers is checked, and one that raises or answers nonsense ends
the part with its name: no batch can be made around it, and a group must not be lost to it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, get_args

from headrace.pipeline.operator_chain import DETAIL_LENGTH, make_operator, operator_class, words
from headrace.pipeline.operators.batch import Batch
from headrace.pipeline.operators.edf import EarliestDeadline
from headrace.pipeline.operators.replay import Replay
from headrace.pipeline.operators.serving import (
    Candidate,
    Moment,
    Order,
    Placement,
    Replaying,
    ServingKind,
    StalenessRule,
)
from headrace.pipeline.operators.staleness import Staleness
from headrace.schemas.config import OperatorConfig, RunConfig
from headrace.schemas.errors import ConfigurationError

__all__ = ("SERVING_KINDS", "Serving", "ServingFailed")

SERVING_KINDS: tuple[str, ...] = get_args(ServingKind)
"""Kinds of operators that work on kept groups, in ``batch``."""
_USUAL: dict[str, Any] = {"staleness": Staleness, "replay": Replay, "order": EarliestDeadline, "batch": Batch}
"""Kind to the operator in force where none is named."""
Answer = TypeVar("Answer")


class ServingFailed(ConfigurationError):
    """A serving operator raised, or answered what cannot be; a restart would meet the same groups."""


class Serving:
    """One operator of each kind. Raises ConfigurationError for two of a kind, and for one that is given a stream."""

    def __init__(self, config: RunConfig, policy: int) -> None:
        name = config.policy_names()[policy]
        self._named: dict[str, OperatorConfig] = {}
        made: dict[str, Any] = {}
        for number, entry in enumerate(config.operators):
            kind = operator_class(entry).kind
            if kind not in SERVING_KINDS or entry.policy not in ("", name):
                continue
            here = f"operators[{number}] ({entry.type})"
            if entry.stream:
                raise ConfigurationError(f"{here}.stream is {entry.stream!r}: a batch mixes streams; name a policy")
            if kind in self._named:
                other = self._named[kind].type
                raise ConfigurationError(f"{here} is a second {kind} for policy {name}, after {other}: keep one")
            self._named[kind] = entry
            made[kind] = make_operator(entry, number)
        for where, usual in _USUAL.items():
            if where not in made:
                made[where] = usual(usual.Configuration())
        self._staleness: StalenessRule = made["staleness"]
        self._replay: Replaying = made["replay"]
        self._order: Order = made["order"]
        self._placement: Placement = made["batch"]

    def name(self, kind: str) -> str:
        """The type of the named operator of a kind; empty where the usual one is in force."""
        return self._named[kind].type if kind in self._named else ""

    def refusal(self, candidate: Candidate, moment: Moment) -> str:
        """Why a group is not served in this batch; empty when it is."""

        def refuse() -> str:
            told = self._staleness.refusal(candidate, moment)
            if not isinstance(told, str):
                raise TypeError(
                    f"it answered {told!r}, which is no text; what may be served is answered by an empty one"
                )
            return words(told, DETAIL_LENGTH)

        return self._asked("staleness", moment, refuse)

    def ranked(self, candidates: Iterable[Candidate], moment: Moment) -> list[int]:
        """Numbers of fresh groups, first served first; ties by admission."""

        def sort() -> list[int]:
            ranks = {c.group.group: tuple(self._order.rank(c, moment)) for c in candidates}
            odd = next((g for g, rank in ranks.items() if any(r != r for r in rank)), None)
            if odd is not None:
                raise ValueError(f"the rank of group {odd} is {ranks[odd]}, which has no order")
            return sorted(ranks, key=lambda g: (ranks[g], g))

        return self._asked("order", moment, sort)

    def capacity(self, batch_groups: int, moment: Moment) -> int:
        """Groups that the pool holds at most."""

        def count() -> int:
            held = self._replay.capacity(batch_groups)
            if not isinstance(held, int) or held < 0:
                raise ValueError(f"its pool holds {held!r}, which is no number of groups")
            return held

        return self._asked("replay", moment, count)

    def replayed(self, pool: Sequence[Candidate], count: int, moment: Moment) -> list[int]:
        """Numbers of the groups to replay, ``count`` at most."""

        def choose() -> list[int]:
            chosen = list(self._replay.choose(pool, count, moment))
            strange = set(chosen) - {c.group.group for c in pool}
            if strange or len(set(chosen)) < len(chosen) or len(chosen) > count:
                offered = [c.group.group for c in pool]
                raise ValueError(f"it chose {chosen[:20]}, not up to {count} different groups of {offered[:20]}")
            return chosen

        return self._asked("replay", moment, choose) if pool and count > 0 else []

    def lanes(self, groups: Sequence[Candidate], lanes: int, moment: Moment) -> list[int]:
        """The lane of each group."""

        def place() -> list[int]:
            placed = list(self._placement.place(groups, lanes))
            if len(placed) != len(groups) or not all(lane in range(lanes) for lane in placed):
                raise ValueError(f"it gave the lanes {placed[:20]} to {len(groups)} groups; lanes are 0 to {lanes - 1}")
            return placed

        return self._asked("batch", moment, place)

    def _asked(self, kind: str, moment: Moment, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except Exception as error:  # the seam around serving operators, which are plug-ins
            which = f"operator {self.name(kind)} ({kind})" if self.name(kind) else f"the usual {kind}"
            where = f"batch {moment.batch} of policy {moment.policy}"
            raise ServingFailed(f"{which} cannot serve {where}: {type(error).__name__}: {error}") from error
