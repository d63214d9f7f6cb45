"""The operators before rollout in their configured order: settings on the configuration, then prompts one at a time.

In: the prompt that would be admitted, outcomes, versions. Out: admitted or skipped, with the operator and the reason.
Each operator has its own part of the store of ``schedule``. One that raises, or ends a prompt in no way or twice, skips
it by name; and whatever drops ``max_skips`` prompts one after the other lets the next one pass.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from pydantic import ValidationError

from headrace.pipeline.operator_chain import (
    DETAIL_LENGTH,
    REASON_LENGTH,
    StorePart,
    error_of,
    logged_error,
    make_operator,
    opened,
    operator_class,
    state_names,
    words,
)
from headrace.pipeline.operators.prompt_operator import (
    Candidate,
    Outcome,
    PromptKind,
    PromptOperator,
    SettingsOperator,
)
from headrace.pipeline.runtime.stage import Context, Metrics, Store
from headrace.pipeline.state import read_json, write_json
from headrace.schemas.config import OperatorConfig, RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Prompt

__all__ = ("PROMPT_KINDS", "PromptChain", "SkippedPrompt", "resolved")

PROMPT_KINDS: tuple[str, ...] = get_args(PromptKind)
"""Kinds of operators that work before rollout: on the configuration, and in ``schedule``."""

_SKIPS = b"operators-skips"


@dataclass(frozen=True, slots=True)
class SkippedPrompt:
    """A prompt that an operator dropped: its name, the policy that it goes by, ``reason`` and numbers in words."""

    operator: str
    policy: int
    reason: str
    detail: str


class _PromptContext:
    """The context of one operator within one call; remembers how the prompt was ended."""

    def __init__(self, entry: "_Entry", context: Context) -> None:
        self.metrics: Metrics = context.metrics
        self.seed = context.config.run.seed
        self.result: SkippedPrompt | bool | None = None
        self._entry, self._context = entry, context

    def store(self) -> Store:
        return StorePart(self._context.store(), f"operator/{self._entry.state}/".encode())

    def admit(self) -> None:
        self._end(True)

    def drop(self, reason: str, detail: str) -> None:
        reason, detail = words(reason, REASON_LENGTH), words(detail, DETAIL_LENGTH)
        self._end(SkippedPrompt(self._entry.name, self._entry.policy, reason, detail))

    def _end(self, result: SkippedPrompt | bool) -> None:
        if self.result is not None:
            raise RuntimeError(f"operator {self._entry.name} ended one prompt twice")
        self.result = result


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One operator of kind ``prompt``: its number in the configuration, the name of its state, where it acts, and the
    policy that it goes by.
    """

    number: int
    state: str
    name: str
    operator: PromptOperator
    streams: tuple[str, ...]
    policy: int


class PromptChain:
    """The operators of kind ``prompt`` of a run, as the task of ``schedule`` holds them."""

    def __init__(self, config: RunConfig) -> None:
        self._entries = [
            _entry(number, state, entry, config)
            for number, (state, entry) in enumerate(zip(state_names(config.operators), config.operators, strict=True))
            if str(operator_class(entry).kind) == "prompt"
        ]
        self._skips: Counter[str] = Counter()
        """``state/stream`` to prompts dropped one after the other."""
        self._in_flight: dict[tuple[str, str], set[int]] = {}

    def open(self, context: Context) -> None:
        """Open every operator."""
        self._skips = Counter(read_json(context.store(), _SKIPS) or {})
        for entry in self._entries:
            own = _PromptContext(entry, context)
            opened(f"operators[{entry.number}] ({entry.name})", context.metrics, partial(entry.operator.open, own))

    def check(self, config: RunConfig) -> None:
        """Ask every operator whether it can work on its streams. Raises ConfigurationError, also for one type twice."""
        first: dict[tuple[str, str], int] = {}
        for entry in self._entries:
            for stream in entry.streams:
                _refuse_second(first, (entry.name, stream), entry.number, f"stream {stream}")
            try:
                entry.operator.check(entry.streams, config)
            except ConfigurationError as error:
                raise ConfigurationError(f"operators[{entry.number}] ({entry.name}): {error}") from error

    # ------------------------------------------------------------------------------------------------ deciding

    def select(self, present: Sequence[str], absent: Collection[str], metrics: Metrics) -> Sequence[str]:
        """Streams whose first prompt may be tried, in order; see ``PromptOperator.select``. An operator that raises, or
        names others than are present, has no say.
        """
        for entry in self._entries:
            chosen: list[str] = []
            if not logged_error(entry.name, metrics, partial(_select, entry, present, absent, chosen)):
                present = chosen
        return present

    def decide(self, prompt: Prompt, context: Context) -> SkippedPrompt | None:
        """Ask the operators in turn; None when all of them let the prompt pass."""
        key = (prompt.stream, prompt.prompt_id)
        candidate = Candidate(prompt=prompt, in_flight=len(self._in_flight.get(key, ())))
        mine = [entry for entry in self._entries if prompt.stream in entry.streams]
        for entry in mine:
            skipped = self._asked(entry, candidate, context)
            if skipped is not None:
                context.metrics.count(
                    "prompts_skipped", operator=entry.name, reason=skipped.reason, stream=prompt.stream
                )  # fmt: skip
                return skipped
        for entry in mine:
            self._told(entry, context, lambda o, c: o.admitted(candidate, c))
        return None

    def _asked(self, entry: _Entry, candidate: Candidate, context: Context) -> SkippedPrompt | None:
        own = _PromptContext(entry, context)
        error = error_of(entry.name, context.metrics, lambda: entry.operator.process(candidate, own))
        if error:
            result: SkippedPrompt | bool | None = SkippedPrompt(entry.name, entry.policy, "broken", error)
        else:
            result = own.result
        if result is None:
            result = SkippedPrompt(entry.name, entry.policy, "broken", "neither admitted nor dropped the prompt")
        key = f"{entry.state}/{candidate.prompt.stream}"
        most = getattr(entry.operator, "max_skips", 0)
        if isinstance(result, SkippedPrompt) and (not most or self._skips[key] < most):
            self._skips[key] += 1
            write_json(context.store(), _SKIPS, self._skips)
            return result
        if isinstance(result, SkippedPrompt):
            context.metrics.count("prompts_forced", operator=entry.name, stream=candidate.prompt.stream)
        if self._skips.pop(key, 0):
            write_json(context.store(), _SKIPS, self._skips)
        return None

    # ------------------------------------------------------------------------------------------------ learning

    def opened(self, group: int, prompt: Prompt) -> None:
        """A group of a prompt is open and has no outcome yet."""
        self._in_flight.setdefault((prompt.stream, prompt.prompt_id), set()).add(group)

    def ended(self, group: int, prompt: Prompt) -> None:
        """Every policy has its outcome of the group, or will have none."""
        key = (prompt.stream, prompt.prompt_id)
        groups = self._in_flight.get(key, set())
        groups.discard(group)
        if not groups:
            self._in_flight.pop(key, None)

    def outcome(self, outcome: Outcome, policy: int, opened: Sequence[int], context: Context) -> None:
        """Tell the operators that go by a policy what a group brought it. Of the policies that the group was ``opened``
        for, who goes by another one hears what it brought the first: so every operator hears of it once, in whatever
        order the ledgers of the policies are read.
        """
        for entry in self._entries:
            teacher = entry.policy if entry.policy in opened else min(opened)
            if outcome.prompt.stream in entry.streams and teacher == policy:
                self._told(entry, context, lambda o, c: o.outcome(outcome, c))

    def moved(self, policy: int, version: int, context: Context) -> None:
        """Tell the operators that go by a policy about its new version."""
        for entry in self._entries:
            if entry.policy == policy:
                self._told(entry, context, lambda o, c: o.moved(version, c))

    @staticmethod
    def _told(entry: _Entry, context: Context, call: Callable[[PromptOperator, _PromptContext], None]) -> None:
        """Call an operator; its error is logged."""
        logged_error(entry.name, context.metrics, lambda: call(entry.operator, _PromptContext(entry, context)))


def _select(entry: _Entry, present: Sequence[str], absent: Collection[str], chosen: list[str]) -> None:
    names = list(entry.operator.select(present, absent))
    if not set(names) <= set(present):
        raise ValueError(f"it selected {names[:20]} of the streams {list(present)}")
    chosen += names


def _entry(number: int, state: str, entry: OperatorConfig, config: RunConfig) -> _Entry:
    operator = make_operator(entry, number)
    given = operator_class(entry).Configuration.model_validate(entry.model_extra or {})
    operator.max_skips = getattr(given, "max_skips", 0)
    names = config.policy_names()
    policy = names.index(entry.policy) if entry.policy in names else -1
    streams = tuple(
        name
        for name in config.streams
        if entry.stream in ("", name) and (policy < 0 or policy in config.stream_policies(name))
    )
    if policy < 0:
        policy = config.stream_policies(streams[0])[0] if streams else 0
    return _Entry(number=number, state=state, name=entry.type, operator=operator, streams=streams, policy=policy)


def _refuse_second(first: dict[tuple[str, str], int], key: tuple[str, str], number: int, where: str) -> None:
    """Two operators of one type would each undo what the other decides."""
    earlier = first.setdefault(key, number)
    if earlier != number:
        raise ConfigurationError(
            f"operators[{number}] ({key[0]}) stands at operators[{earlier}] too for {where}: keep one"
        )


def resolved(config: RunConfig) -> RunConfig:
    """The configuration with its operators of kind ``settings`` applied; the same when that is done again.

    Raises ConfigurationError when what they ask for cannot be.
    """
    policies, streams = dict(config.policies), dict(config.streams)
    acted = []
    first: dict[tuple[str, str], int] = {}
    for number, entry in enumerate(config.operators):
        cls = operator_class(entry)
        if not hasattr(cls, "policy"):  # operators at serving set their policy's knobs too
            continue
        if entry.stream not in ("", *streams) or entry.policy not in ("", *policies):  # ``flow.validate`` names it
            continue
        operator = make_operator(entry, number)
        if isinstance(operator, SettingsOperator):
            operator.look_at(config)
        acted.append(f"operators[{number}] ({entry.type})")
        for name in [name for name in policies if entry.policy in ("", name)]:
            if not entry.stream or config.policy_names().index(name) in config.stream_policies(entry.stream):
                _refuse_second(first, (entry.type, f"policy {name}"), number, f"policy {name}")
                policies[name] = operator.policy(name, policies[name])
        for name in [n for n in streams if entry.stream in ("", n) and hasattr(operator, "stream")]:
            if not entry.policy or config.policy_names().index(entry.policy) in config.stream_policies(name):
                streams[name] = operator.stream(name, streams[name])
    if not acted:
        return config
    plain = config.model_copy(update={"policies": policies, "streams": streams}).model_dump()
    try:
        return RunConfig.model_validate(plain)
    except ValidationError as error:
        what = "; ".join(detail["msg"].removeprefix("Value error, ") for detail in error.errors())
        raise ConfigurationError(f"with {' and '.join(acted)}: {what}") from error
