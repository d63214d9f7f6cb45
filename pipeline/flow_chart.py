"""The topology as data and as a Mermaid chart, for documents and programs; ``flow.describe`` is the text for people.

In: a configuration or none; out: stages with their inputs and outputs, topics with writers and readers, operators.
"""

from collections.abc import Iterator
from typing import Any

from headrace.pipeline.flow import FILES, STAGES
from headrace.pipeline.operator_chain import operator_class
from headrace.schemas.config import RunConfig
from headrace.schemas.topics import STORES, SUB_TOPOLOGIES, TOPICS

__all__ = ("as_data", "as_mermaid")


def as_data(config: RunConfig | None = None) -> dict[str, Any]:
    """Topics, stages and, for a configuration, operators, as JSON data."""
    out: dict[str, Any] = {
        "topics": [
            {
                "name": f"{t.name}.<policy>" if t.per_policy else t.name, "records": list(t.records),
                "writers": list(t.writers), "readers": list(t.readers), "partitions": t.partitions, "key": t.by,
            }
            for t in TOPICS
        ],
        "stages": [
            {"name": sub, "file": FILES[sub], "inputs": list(SUB_TOPOLOGIES[sub]), "stores": list(STORES[sub])}
            for sub in STAGES
        ],
    }  # fmt: skip
    if config is not None:
        out["operators"] = [
            {"type": e.type, "kind": operator_class(e).kind, "stream": e.stream, "policy": e.policy}
            for e in config.operators
        ]
    return out


def as_mermaid(config: RunConfig | None = None) -> str:
    """A Mermaid flowchart: programs as boxes, topics as cylinders; operators stand within ``trajectory_to_group``."""
    return "\n".join(_chart(config))


def _chart(config: RunConfig | None) -> Iterator[str]:
    yield "flowchart LR"
    programs = sorted({name for t in TOPICS for name in (*t.writers, *t.readers)})
    operators = [entry.type for entry in config.operators] if config is not None else []
    for name in programs:
        label = name
        if name == FILES["assemble"] and operators:
            label = "<br/>".join((name, *operators))
        yield f'  {name}["{label}"]'
    for topic in TOPICS:
        node = f"topic_{topic.name.replace('-', '_')}"
        shown = f"{topic.name}.#lt;policy#gt;" if topic.per_policy else topic.name
        yield f'  {node}[("{shown}")]'
        for writer in topic.writers:
            yield f"  {writer} --> {node}"
        for reader in topic.readers:
            yield f"  {node} --> {reader}"
