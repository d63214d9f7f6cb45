"""The topology on one screen: which stage reads what, who makes it, and whether a configuration can work.

``STAGES`` is what a worker runs, ``describe`` what ``headrace flow show`` prints, ``validate`` what ``headrace run``
asks before anything starts.
"""

from collections.abc import Iterator, Mapping

from headrace.connectors import plugins
from headrace.pipeline.group_to_batch import Batch
from headrace.pipeline.operator_chain import GROUP_KINDS, OperatorChain, operator_class
from headrace.pipeline.prompt_chain import PROMPT_KINDS, PromptChain, resolved
from headrace.pipeline.prompt_to_task import Schedule
from headrace.pipeline.runtime.stage import Stage, StageFactory
from headrace.pipeline.serving import SERVING_KINDS, Serving
from headrace.pipeline.trajectory_to_group import Assemble
from headrace.pipeline.workflows.streams import workflow_of
from headrace.schemas.config import OperatorConfig, RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.topics import STORES, SUB_TOPOLOGIES, TOPICS

__all__ = ("STAGES", "describe", "filtered_policies", "scored_streams", "validate")

ORDER = (*PROMPT_KINDS, *GROUP_KINDS, *SERVING_KINDS)
"""Kinds of operators in the only order that works: prompts come before groups, statistics are taken between shape and
filter (protocol 6), and groups are served when they have closed."""
STAGE_OF_KIND = {
    **dict.fromkeys(PROMPT_KINDS, "schedule"),
    **dict.fromkeys(GROUP_KINDS, "assemble"),
    **dict.fromkeys(SERVING_KINDS, "batch"),
}
"""Kind of an operator to the stage that it works in."""


def _schedule(config: RunConfig, partition: int) -> Stage:
    return Schedule(resolved(config), filtered_policies(config))


def _assemble(config: RunConfig, partition: int) -> Stage:
    return Assemble(resolved(config), partition, scored_streams(config))


def _batch(config: RunConfig, partition: int) -> Stage:
    return Batch(resolved(config), partition)


STAGES: Mapping[str, StageFactory] = {
    "schedule": _schedule,  # prompts, demand, ledger, steps -> admissions, tasks, ledger, run
    "assemble": _assemble,  # trajectories, admissions       -> groups, ledger
    "batch": _batch,        # groups, ledger, steps          -> batches.<policy>, manifests, ledger
}  # fmt: skip
"""Sub-topology to the factory of its tasks; inputs are ``topics.SUB_TOPOLOGIES``."""

FILES: Mapping[str, str] = {
    "schedule": "prompt_to_task",
    "assemble": "trajectory_to_group",
    "batch": "group_to_batch",
}
"""Sub-topology to the stage file that topics.TOPICS names as writer and reader."""


def filtered_policies(config: RunConfig) -> frozenset[int]:
    """Policies whose groups some configured operator may drop; only they admit more than they need (protocol 3)."""
    names = config.policy_names()
    dropping = [entry for entry in config.operators if operator_class(entry).kind == "filter"]
    return frozenset(i for i, name in enumerate(names) if any(entry.policy in ("", name) for entry in dropping))


def scored_streams(config: RunConfig) -> frozenset[str]:
    """Streams with a reward of group scope: their groups wait for a Score.

    Raises ConfigurationError for a ``group_reward`` that scores single trajectories.
    """
    scored = set()
    for name, stream in config.streams.items():
        if stream.group_reward and _scope(stream.group_reward) != "group":
            raise ConfigurationError(
                f"streams.{name}.group_reward is {stream.group_reward!r}, which scores single trajectories: set it as "
                f"streams.{name}.reward"
            )
        if stream.group_reward or _scope(stream.reward) == "group":
            scored.add(name)
    return frozenset(scored)


def _scope(reward: str) -> str:
    return str(getattr(plugins.load("headrace.rewards", reward), "scope", "trajectory"))


def validate(config: RunConfig) -> None:
    """Raise ConfigurationError for what cannot work: unknown names, operators in a wrong order or badly configured."""
    for number, entry in enumerate(config.operators):
        _check_scope(number, entry, config)
    config = resolved(config)
    PromptChain(config).check(config)
    OperatorChain(config)
    for policy, (name, knobs) in enumerate(config.policies.items()):
        Serving(config, policy)
        if knobs.replay and not knobs.staleness_bound():
            raise ConfigurationError(
                f"policies.{name}.replay is {knobs.replay:g}, but its bound of staleness is 0"
                f"{' at depth 0' if knobs.depth == 0 else ''}: a group that has been trained is older than that. "
                "Give it lag, a depth with max_staleness, or no replay"
            )
    for stream in config.streams:
        for policy in config.stream_policies(stream):
            _check_order(stream, config.policy_names()[policy], config.operators)
    for name, section in config.streams.items():
        workflow_of(config, name)
        if section.pacing not in ("any", "all") and section.pacing not in config.policies:
            choices = ", ".join(("any", "all", *config.policies))
            raise ConfigurationError(f"streams.{name}.pacing is {section.pacing!r}: it must be one of {choices}")
        if section.format != "auto" and ":" not in section.format:
            plugins.find("headrace.datasets", section.format)
    scored_streams(config)
    named = [("headrace.engines", config.rollout.engine)]
    for name in config.policies:
        trainer = config.trainer_of(name)
        named += [("headrace.losses", trainer.loss), ("headrace.advantages", trainer.advantage)]
    for group, name in named:
        if ":" not in name:  # found by name only: to import one would import torch
            plugins.find(group, name)


def describe(config: RunConfig | None = None) -> str:
    """The topology as text: every topic with its writers and readers, every stage with inputs, outputs and stores."""
    return "\n".join(_lines(config))


def _lines(config: RunConfig | None) -> Iterator[str]:
    yield "topics"
    for topic in TOPICS:
        name = f"{topic.name}.<policy>" if topic.per_policy else topic.name
        yield f"  {name:18} {' '.join(topic.records) or 'anything undecodable'}"
        yield f"  {'':18} {', '.join(topic.writers)} -> {', '.join(topic.readers)}; partitions: {topic.partitions}"
    yield "stages"
    for sub in STAGES:
        outputs = [t.name for t in TOPICS if FILES[sub] in t.writers and t.name != "dead-letters"]
        yield f"  {sub:18} {FILES[sub]}: {', '.join(SUB_TOPOLOGIES[sub])} -> {', '.join(outputs)}"
        yield f"  {'':18} stores: {', '.join(STORES[sub])}"
    if config is not None:
        yield "operators"
        for entry in config.operators:
            kind = operator_class(entry).kind
            where = " ".join(x for x in (entry.stream and f"stream {entry.stream}", entry.policy) if x) or "everywhere"
            yield f"  {entry.type:18} {kind}, {where}, in {STAGE_OF_KIND[kind]}"
        if not config.operators:
            yield "  none"


def _check_scope(number: int, entry: OperatorConfig, config: RunConfig) -> None:
    if entry.stream and entry.stream not in config.streams:
        raise ConfigurationError(
            f"operators[{number}] ({entry.type}).stream is {entry.stream!r}; streams are {', '.join(config.streams)}"
        )
    if entry.policy and entry.policy not in config.policies:
        raise ConfigurationError(
            f"operators[{number}] ({entry.type}).policy is {entry.policy!r}; policies are {', '.join(config.policies)}"
        )


def _check_order(stream: str, policy: str, entries: list[OperatorConfig]) -> None:
    last, before = 0, ""
    for number, entry in enumerate(entries):
        if entry.stream not in ("", stream) or entry.policy not in ("", policy):
            continue
        kind = operator_class(entry).kind
        if kind not in ORDER:
            raise ConfigurationError(
                f"operators[{number}] ({entry.type}) is of kind {kind!r}, none of {', '.join(ORDER)}"
            )
        place = ORDER.index(kind)
        if place < last:
            raise ConfigurationError(
                f"operators[{number}] ({entry.type}, {kind}) stands after {before}, but the order is "
                f"{', '.join(ORDER).replace('shape, ', 'shape, statistics, ')}: move it up"
            )
        last, before = place, f"{entry.type} ({kind})"
