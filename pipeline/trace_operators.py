"""Which operators a kept group has passed, from the configuration in the run's manifest.

In: a connection. Out: names by stream and policy. Nothing is imported that is not installed here: an operator whose
package is missing is named all the same.
"""

import json
from typing import Any

from headrace.connectors.kafka import Connection
from headrace.pipeline.operator_chain import GROUP_KINDS, operator_class
from headrace.pipeline.run_records import read_records
from headrace.schemas.config import OperatorConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Kept, RunManifest

__all__ = ("Passed", "kept_text")


class Passed:
    """The operators on closed groups of a run; none for a run whose manifest holds no configuration."""

    def __init__(self, connection: Connection) -> None:
        self._policies: list[str] = []
        self._entries: list[OperatorConfig] = []
        for _, record in read_records(connection, "run"):
            if isinstance(record, RunManifest) and record.config.startswith("{"):
                self._policies = record.policies
                given: list[Any] = json.loads(record.config).get("operators", [])
                self._entries = [entry for entry in map(OperatorConfig.model_validate, given) if _on_groups(entry)]

    def names(self, stream: str, policy: int) -> list[str]:
        """Types of the entries that concern a stream and a policy, in their order."""
        name = self._policies[policy] if policy < len(self._policies) else ""
        return [e.type for e in self._entries if e.stream in ("", stream) and e.policy in ("", name)]


def _on_groups(entry: OperatorConfig) -> bool:
    try:
        return operator_class(entry).kind in GROUP_KINDS
    except ConfigurationError:
        return True


def kept_text(record: Kept, names: list[str]) -> str:
    """What a trace says of a kept group: the operators that let it pass, its raw reward and what they made of it."""
    by = f" by {', '.join(names)}" if names else ""
    shaped = f", {record.reward_mean:.3f} as shaped" if names and record.reward_mean != record.raw_mean else ""
    return f"group {record.group} kept{by}: mean reward {record.raw_mean:.3f}{shaped}"
