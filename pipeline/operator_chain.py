"""The operators of a stream and policy in their configured order, applied to one closed group at a time.

Each operator has its own part of the task's store and its own timers. An operator that raises, or neither emits nor
drops, ends the group by name, so that no group can vanish or stand still without a reason. So does one that emits what
may not travel: it would end the task, and with it every group that the task holds.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from traceback import TracebackException
from typing import Any

from pydantic import ValidationError

from headrace.connectors import plugins
from headrace.pipeline.operators.operator import GroupDraft, Operator, OperatorConfiguration
from headrace.pipeline.runtime.sqlite_store import StoreFile
from headrace.pipeline.runtime.stage import Context, Metrics, Store
from headrace.schemas import codec
from headrace.schemas.checks import check_sequence
from headrace.schemas.config import OperatorConfig, RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Member

__all__ = (
    "GROUP_KINDS",
    "Dropped",
    "OperatorChain",
    "StorePart",
    "error_of",
    "logged_error",
    "make_operator",
    "opened",
    "operator_class",
    "state_names",
    "words",
)

log = logging.getLogger(__name__)

GROUP_KINDS = ("shape", "filter", "downsample")
"""Kinds of operators that work on closed groups, in ``assemble``."""
REASON_LENGTH, DETAIL_LENGTH = 100, 1000
"""Characters of a reason and of its detail that go into the ledger."""
_METHODS = {
    **dict.fromkeys(GROUP_KINDS, ("open", "process", "on_timer", "close")),
    "prompt": ("check", "open", "select", "process", "admitted", "outcome", "moved"),
    "staleness": ("refusal",),
    "replay": ("capacity", "choose"),
    "order": ("rank",),
    "batch": ("place",),
}
"""Kind of an operator to the methods that are called."""
_HERE = Path(__file__).parent
_OURS = (_HERE, _HERE / "runtime", Path(codec.__file__).parent)
"""Folders of modules between an operator and the seam around it."""


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


def state_names(entries: Iterable[OperatorConfig]) -> list[str]:
    """A name for the state of each entry that stays when a resumed run has others before it, or in another order.

    >>> [one, two] = [OperatorConfig(type="dedup"), OperatorConfig(type="dedup")]
    >>> state_names([OperatorConfig(type="length", policy="a"), one, two])
    ['length..a.0', 'dedup...0', 'dedup...1']
    """
    seen: Counter[str] = Counter()
    names = []
    for entry in entries:
        name = f"{entry.type}.{entry.stream}.{entry.policy}".replace("/", "_")
        names.append(f"{name}.{seen[name]}")
        seen[name] += 1
    return names


class _OperatorContext:
    """The context of one operator within one call; remembers how the ``given`` group was ended.

    Without a group, in ``open`` and ``on_timer``, nothing can be ended.
    """

    def __init__(self, name: str, state: str, context: Context, given: GroupDraft | None = None) -> None:
        self.metrics: Metrics = context.metrics
        self.result: GroupDraft | Dropped | None = None
        self._given = given
        self._name, self._state, self._context = name, state, context

    def now(self) -> int:
        return self._context.now()

    def store(self) -> Store:
        return StorePart(self._context.store(), f"operator/{self._state}/".encode())

    def schedule(self, key: str, at_ms: int) -> None:
        if not isinstance(at_ms, int):
            raise TypeError(f"a timer is due at whole milliseconds, not at {at_ms!r}")
        self._context.schedule(f"operator/{self._state}/{key}", at_ms)

    def emit(self, draft: GroupDraft) -> None:
        if self._given is not None and draft is not self._given:
            _check_emitted(draft, self._given)
        self._end(draft)

    def drop(self, reason: str, detail: str) -> None:
        reason = words(reason, REASON_LENGTH)
        self._end(Dropped(self._name, f"{reason}: {words(detail, DETAIL_LENGTH)}"))
        self.metrics.count("groups_dropped", operator=self._name, reason=reason)

    def _end(self, result: GroupDraft | Dropped) -> None:
        if self._given is None:
            raise RuntimeError(f"operator {self._name} can end no group here: there is none")
        if self.result is not None:
            raise RuntimeError(f"operator {self._name} ended one group twice")
        self.result = result


def words(text: object, length: int) -> str:
    """Text of a plug-in as it may travel: valid Unicode, of ``length`` characters at most.

    >>> words("a lone \\ud800 and more", 8)
    'a lone ?'
    """
    return str(text)[:length].encode("utf-8", "replace").decode("utf-8")


def _check_emitted(draft: GroupDraft, given: GroupDraft) -> None:
    """Raise TypeError, ValueError or what the codec raises for a draft that is not the given group in another form."""
    if not isinstance(draft, GroupDraft):
        raise TypeError(f"it emitted a {type(draft).__name__}, and groups go on as a GroupDraft")
    group, before = draft.group, given.group
    same = (before.policy, before.group, before.stream, before.prompt_id)
    if (group.policy, group.group, group.stream, group.prompt_id) != same:
        raise ValueError(f"it emitted group {group.group} of policy {group.policy} in the place of the one that it got")
    known = {m.replica: m for m in given.members}
    if not {m.replica for m in draft.members} <= known.keys() or len(draft.members) > len(known):
        raise ValueError(f"it emitted the replicas {[m.replica for m in draft.members][:20]} of {sorted(known)[:20]}")
    codec.encode(group)
    for member in draft.members:
        if member is not known[member.replica]:
            _check_member(member)
    counts = len(draft.members), len(draft.counted()), len(draft.trained())
    if (group.members, group.counted, group.trained) != counts:
        raise ValueError("its Group counts other members than it has: make the draft by with_members")
    if not group.trained:
        raise ValueError("it left no member to train: drop the group by a reason instead")


def _check_member(member: Member) -> None:
    """Everything but arrays as they were is encoded once more; these are checked once, whoever has them."""
    for sequence in member.sequences:
        check_sequence(sequence)
    codec.encode(replace(member, sequences=[]))


def operator_class(entry: OperatorConfig) -> type[Operator]:
    """The class behind an ``[[operators]]`` entry. Raises ConfigurationError when there is none of that type."""
    found: type[Operator] = plugins.load("headrace.operators", entry.type)
    settings = getattr(found, "Configuration", None)
    if not (isinstance(found, type) and hasattr(found, "kind") and isinstance(settings, type)):
        raise ConfigurationError(
            f"operator {entry.type!r} is {found!r}: it must be a class with kind and Configuration"
        )
    taken = sorted({"type", "stream", "policy"}.intersection(getattr(settings, "model_fields", ())))
    if taken:
        told = f"operator {entry.type!r} has a key {taken[0]} of its own, which every entry has: call it otherwise"
        raise ConfigurationError(told)
    lacking = [name for name in _METHODS.get(found.kind, ()) if not callable(getattr(found, name, None))]
    if lacking:
        raise ConfigurationError(f"operator {entry.type!r} of kind {found.kind} has no method {', '.join(lacking)}")
    return found


def make_operator(entry: OperatorConfig, number: int) -> Any:
    """The operator of the ``number``-th entry, of whatever kind. Raises ConfigurationError for settings it refuses."""
    cls = operator_class(entry)
    try:
        configuration = cls.Configuration.model_validate(entry.model_extra or {})
    except ValidationError as error:
        what = "; ".join(_refused(detail, cls.Configuration) for detail in error.errors())
        raise ConfigurationError(f"operators[{number}] ({entry.type}): {what}") from error
    made: list[Any] = []
    make: Any = cls
    why = _caught(lambda: made.append(make(configuration)))
    if why is None:
        return made[0]
    if isinstance(why, ConfigurationError):
        raise why
    raise ConfigurationError(f"operators[{number}] ({entry.type}) cannot be made: it raised {_described(why)}") from why


def _refused(detail: Any, settings: type[OperatorConfiguration]) -> str:
    """One thing that is wrong with the keys of an entry, in words."""
    path = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
        near = get_close_matches(path, settings.model_fields, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; keys are {', '.join(settings.model_fields) or 'none'}"
        return f"unknown key {path}{hint}"
    told: str = detail["msg"].removeprefix("Value error, ")
    return f"{path}: {told}" if path else told


def _caught(call: Callable[[], None]) -> Exception | None:
    """What a call of an operator raised. Raises StoreFile, the disk's fault and not the operator's: that ends the task,
    which is restored.
    """
    try:
        call()
    except StoreFile:
        raise
    except Exception as error:  # the seam around operators, which are plug-ins
        return error
    return None


def error_of(name: str, metrics: Metrics, call: Callable[[], None]) -> str:
    """Call an operator; gives the error that it raised in words, empty when there is none, and counts it."""
    error = _caught(call)
    if error is None:
        return ""
    metrics.count("operator_errors", operator=name, error=type(error).__name__)
    return words(f"raised {_described(error)}", DETAIL_LENGTH)


def logged_error(name: str, metrics: Metrics, call: Callable[[], None]) -> str:
    """``error_of`` for a call that decides about nothing, so that no record tells of it: the log does."""
    error = error_of(name, metrics, call)
    if error:
        log.warning("operator %s: it %s", name, error)
    return error


def _described(error: Exception) -> str:
    """Type, message and the line of the operator, or of what it called, that raised; ours are left out."""
    told = TracebackException.from_exception(error)
    text = list(told.format_exception_only())[-1].strip()
    theirs = [f for f in told.stack if Path(f.filename).parent not in _OURS]
    return f"{text} ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else text


def opened(where: str, metrics: Metrics, call: Callable[[], None]) -> None:
    """Open an operator. Raises ConfigurationError when it cannot: a restart would meet the same state."""
    error = error_of(where, metrics, call)
    if error:
        raise ConfigurationError(f"{where} cannot open: it {error}")


def _applied(name: str, operator: Operator, draft: GroupDraft, context: _OperatorContext) -> GroupDraft | Dropped:
    error = error_of(name, context.metrics, lambda: operator.process(draft, context))
    if error:
        return Dropped(name, error, broken=True)
    return context.result or Dropped(name, "neither emitted nor dropped the group", broken=True)


class OperatorChain:
    """The operators of a run that work on closed groups, as one task of ``assemble`` holds them."""

    def __init__(self, config: RunConfig) -> None:
        self._policies = config.policy_names()
        states = state_names(config.operators)
        self._entries: Sequence[tuple[int, str, OperatorConfig, Operator]] = [
            (number, states[number], entry, make_operator(entry, number))
            for number, entry in enumerate(config.operators)
            if operator_class(entry).kind in GROUP_KINDS
        ]
        self._opened: list[tuple[str, Metrics, Operator]] = []

    def open(self, context: Context) -> None:
        """Open every operator."""
        for number, state, entry, operator in self._entries:
            own = _OperatorContext(entry.type, state, context)
            opened(f"operators[{number}] ({entry.type})", context.metrics, partial(operator.open, own))
            self._opened.append((entry.type, context.metrics, operator))

    def close(self) -> None:
        """Close every operator that was opened; an error there is logged and counted."""
        while self._opened:
            name, metrics, operator = self._opened.pop()
            logged_error(name, metrics, operator.close)

    def run(self, draft: GroupDraft, context: Context) -> GroupDraft | Dropped:
        """Apply the operators that concern the draft's stream and policy until one drops it.

        An operator that raises ends the group as broken, with the error in words; the run goes on.
        """
        for _, state, entry, operator in self._entries:
            if entry.stream not in ("", draft.group.stream):
                continue
            if entry.policy not in ("", self._policies[draft.group.policy]):
                continue
            result = _applied(entry.type, operator, draft, _OperatorContext(entry.type, state, context, draft))
            if isinstance(result, Dropped):
                return result
            draft = result
        return draft

    def on_timer(self, key: str, context: Context) -> None:
        """Hand a timer ``operator/<state>/<key>`` to its operator; an error there is logged and counted."""
        _, state, timer = key.split("/", 2)
        found = [(entry, operator) for _, name, entry, operator in self._entries if name == state]
        for entry, operator in found:
            own = _OperatorContext(entry.type, state, context)
            logged_error(entry.type, context.metrics, partial(operator.on_timer, timer, own))
