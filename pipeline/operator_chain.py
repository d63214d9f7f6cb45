"""The operators of a stream and policy in their configured order, applied to one closed group at a time.

Each operator has its own part of the task's store and its own timers. An operator that raises, or neither emits nor
drops, ends the group by name, so that no group can vanish or stand still without a reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from headrace.connectors import plugins
from headrace.pipeline.operators.operator import GroupDraft, Operator
from headrace.pipeline.runtime.sqlite_store import StoreFile
from headrace.pipeline.runtime.stage import Context, Metrics, Store
from headrace.schemas.config import OperatorConfig, RunConfig
from headrace.schemas.errors import ConfigurationError

__all__ = ("GROUP_KINDS", "Dropped", "OperatorChain", "StorePart", "error_of", "make_operator", "operator_class")

GROUP_KINDS = ("shape", "filter", "downsample")
"""Kinds of operators that work on closed groups, in ``assemble``."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that an operator ended: the operator's name and ``reason: numbers in words``.

    ``broken`` says that the operator did not decide but raised, or ended the group in no way or twice.
    """

    operator: str
    detail: str
    broken: bool = False


class StorePart:
    """A store's keys under a prefix, as a Store of its own."""

    def __init__(self, store: Store, prefix: bytes) -> None:
        self._store, self._prefix = store, prefix

    def get(self, key: bytes) -> bytes | None:
        """The value of a key."""
        return self._store.get(self._prefix + key)

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key."""
        self._store.put(self._prefix + key, value)

    def delete(self, key: bytes) -> None:
        """Remove a key."""
        self._store.delete(self._prefix + key)

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys with the prefix, in order, with their values."""
        for key, value in self._store.scan(self._prefix + prefix):
            yield key[len(self._prefix) :], value


class _OperatorContext:
    """The context of one operator within one call; remembers how the group was ended."""

    def __init__(self, name: str, number: int, context: Context) -> None:
        self.metrics: Metrics = context.metrics
        self.result: GroupDraft | Dropped | None = None
        self._name, self._number, self._context = name, number, context

    def now(self) -> int:
        return self._context.now()

    def store(self) -> Store:
        return StorePart(self._context.store(), f"operator/{self._number}/".encode())

    def schedule(self, key: str, at_ms: int) -> None:
        self._context.schedule(f"operator/{self._number}/{key}", at_ms)

    def emit(self, draft: GroupDraft) -> None:
        self._end(draft)

    def drop(self, reason: str, detail: str) -> None:
        self._end(Dropped(self._name, f"{reason}: {detail}"))
        self.metrics.count("groups_dropped", operator=self._name, reason=reason)

    def _end(self, result: GroupDraft | Dropped) -> None:
        if self.result is not None:
            raise RuntimeError(f"operator {self._name} ended one group twice")
        self.result = result


def operator_class(entry: OperatorConfig) -> type[Operator]:
    """The class behind an ``[[operators]]`` entry. Raises ConfigurationError when there is none of that type."""
    found: type[Operator] = plugins.load("headrace.operators", entry.type)
    return found


def make_operator(entry: OperatorConfig, number: int) -> Any:
    """The operator of the ``number``-th entry, of whatever kind. Raises ConfigurationError for settings it refuses."""
    cls = operator_class(entry)
    try:
        configuration = cls.Configuration.model_validate(entry.model_extra or {})
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigurationError(f"operators[{number}] ({entry.type}): {what}") from error
    made: Any = cls
    return made(configuration)


def error_of(name: str, metrics: Metrics, call: Callable[[], None]) -> str:
    """Call an operator; gives the error that it raised in words, empty when there is none, and counts it."""
    try:
        call()
    except StoreFile:  # the disk's fault, not the operator's: the task ends and is restored, nothing is lost to it
        raise
    except Exception as error:  # the seam around operators, which are plug-ins
        metrics.count("operator_errors", operator=name, error=type(error).__name__)
        return f"raised {type(error).__name__}: {error}"
    return ""


def _applied(name: str, operator: Operator, draft: GroupDraft, context: _OperatorContext) -> GroupDraft | Dropped:
    error = error_of(name, context.metrics, lambda: operator.process(draft, context))
    if error:
        return Dropped(name, error, broken=True)
    return context.result or Dropped(name, "neither emitted nor dropped the group", broken=True)


class OperatorChain:
    """The operators of a run that work on closed groups, as one task of ``assemble`` holds them."""

    def __init__(self, config: RunConfig) -> None:
        self._policies = config.policy_names()
        self._entries: Sequence[tuple[int, OperatorConfig, Operator]] = [
            (number, entry, make_operator(entry, number))
            for number, entry in enumerate(config.operators)
            if operator_class(entry).kind in GROUP_KINDS
        ]

    def open(self, context: Context) -> None:
        """Open every operator."""
        for number, entry, operator in self._entries:
            operator.open(_OperatorContext(entry.type, number, context))

    def run(self, draft: GroupDraft, context: Context) -> GroupDraft | Dropped:
        """Apply the operators that concern the draft's stream and policy until one drops it.

        An operator that raises ends the group as broken, with the error in words; the run goes on.
        """
        for number, entry, operator in self._entries:
            if entry.stream not in ("", draft.group.stream):
                continue
            if entry.policy not in ("", self._policies[draft.group.policy]):
                continue
            result = _applied(entry.type, operator, draft, _OperatorContext(entry.type, number, context))
            if isinstance(result, Dropped):
                return result
            draft = result
        return draft

    def on_timer(self, key: str, context: Context) -> None:
        """Hand a timer ``operator/<number>/<key>`` to its operator."""
        _, number, own = key.split("/", 2)
        found = [(entry, operator) for at, entry, operator in self._entries if at == int(number)]
        for entry, operator in found:
            operator.on_timer(own, _OperatorContext(entry.type, int(number), context))
