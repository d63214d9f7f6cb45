"""The operators of a run in words, for its report: kind, the package that brings each, and what it dropped.

In: a configuration and what the ledgers add up to; out: a line for each entry of ``[[operators]]``, in their order.
"""

from headrace.connectors import plugins
from headrace.pipeline.operator_chain import operator_class
from headrace.pipeline.tally import Tally
from headrace.schemas.config import OperatorConfig, RunConfig
from headrace.schemas.errors import ConfigurationError

__all__ = ("operators_in_words",)


def operators_in_words(config: RunConfig, tally: Tally) -> dict[str, str]:
    """Type (with a number where it stands there again) to what is known of it."""
    out: dict[str, str] = {}
    for entry in config.operators:
        again = sum(name.partition(" ")[0] == entry.type for name in out)
        out[f"{entry.type} {again + 1}" if again else entry.type] = _words(entry, tally)
    return out


def _words(entry: OperatorConfig, tally: Tally) -> str:
    mark = f"({entry.type})"
    dropped = sum(
        count for policy in tally.policies.values() for why, count in policy.closed.items() if why.endswith(mark)
    )
    skipped = sum(policy.skipped[entry.type] for policy in tally.policies.values())
    try:
        kind: str = operator_class(entry).kind
    except ConfigurationError:  # a report can be made where the package is not installed
        kind = "not installed here"
    where = "" if ":" in entry.type else _package(entry.type)
    scope = " ".join(part for part in (entry.stream, entry.policy) if part)
    drops = [f"{dropped} groups dropped" if dropped else "", f"{skipped} prompts skipped" if skipped else ""]
    parts = [kind, where and f"of {where}", scope and f"for {scope}", *drops]
    return ", ".join(part for part in parts if part)


def _package(name: str) -> str:
    found = plugins.installed("headrace.operators").get(name)
    return found.dist.name if found is not None and found.dist is not None else ""
