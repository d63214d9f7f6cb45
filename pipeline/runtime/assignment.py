"""Which tasks a member of a consumer group runs, given the partitions that the group handed to it (protocol 2).

``schedule`` is one task whose token is ``prompts[0]``: its holder reads every partition of all four topics, the others
nothing. The other sub-topologies have a task per partition number, with that partition of every input topic.
"""

from collections.abc import Collection, Mapping

from headrace.pipeline.runtime.frontier import Place
from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.ids import changelog_topic
from headrace.schemas.topics import STORES, SUB_TOPOLOGIES, TOPICS, spec_of

__all__ = ("SINGLE_TASK", "input_places", "output_places", "tasks_of")

SINGLE_TASK = frozenset({"schedule"})
"""Sub-topologies with one task for the run."""


def input_places(sub_topology: str, counts: Mapping[str, int]) -> list[Place]:
    """Every input partition of a sub-topology. ``counts`` are the partition counts of the run's topics.

    Raises ConfigurationError when topics that have to be partitioned alike are not.
    """
    topics = SUB_TOPOLOGIES[sub_topology]
    if sub_topology not in SINGLE_TASK and len({counts[topic] for topic in topics}) > 1:
        found = ", ".join(f"{topic} {counts[topic]}" for topic in topics)
        raise ConfigurationError(
            f"the inputs of {sub_topology} must have equal partition counts, found {found}; delete the run's topics "
            "and create them again"
        )
    return [(topic, p) for topic in topics for p in range(counts[topic])]


def tasks_of(sub_topology: str, given: Collection[Place], counts: Mapping[str, int]) -> dict[int, tuple[Place, ...]]:
    """Tasks by number with their input partitions. Raises HeadraceError when the group did not co-partition."""
    topics = SUB_TOPOLOGIES[sub_topology]
    if sub_topology in SINGLE_TASK:
        return {0: tuple(input_places(sub_topology, counts))} if (topics[0], 0) in given else {}
    out: dict[int, tuple[Place, ...]] = {}
    for number in sorted({partition for _, partition in given}):
        places = tuple((topic, number) for topic in topics)
        if not set(places) <= set(given):
            raise HeadraceError(
                f"{sub_topology}: partition {number} of {', '.join(topics)} was not given to one member: all members "
                "of the group must use the range assignor and subscribe to the same topics"
            )
        out[number] = places
    return out


def output_places(sub_topology: str, counts: Mapping[str, int]) -> list[Place]:
    """Every partition that a sub-topology writes, its changelogs included (what a sweep touches, protocol 7)."""
    stage = set.intersection(*(set(spec_of(topic).readers) for topic in SUB_TOPOLOGIES[sub_topology]))
    names = {spec.name for spec in TOPICS if stage & set(spec.writers)}
    topics = [t for t in counts if t.split(".", 1)[0] in names]
    topics += [changelog_topic(sub_topology, store) for store in STORES[sub_topology]]
    return [(topic, p) for topic in topics for p in range(counts[topic])]
