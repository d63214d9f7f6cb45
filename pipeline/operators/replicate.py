"""More of a prompt than its group needs, and more groups than a batch needs, so that slow or broken ones are spared.

Every replica of a prompt is a task of its own and goes to whichever worker has room (prompt replication of ROLL Flash).
`extra` replicas beyond the group's size let a group close with the first that are usable; `extra_groups` let a batch be
filled by the first groups. Both keep what finishes early, which are the short answers, and are off unless asked for
(protocol 5). `preset = "flaky"` is for environments that fail or hang: one spare replica, two spare groups.
"""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_operator import SettingsOperator
from headrace.schemas.config import PolicyConfig, StreamConfig

__all__ = ("Replicate", "ReplicateConfiguration")

PRESETS = {"": (0, 0), "flaky": (1, 2)}
"""Spare replicas and spare groups."""


class ReplicateConfiguration(OperatorConfiguration):
    """``preset``: ``flaky``, or none. ``replicas``: group size; unset, the stream's own. ``extra``: tasks beyond it.
    ``extra_groups``: groups beyond what batches need. What is set goes before the preset.
    """

    preset: Literal["", "flaky"] = ""
    replicas: int | None = Field(None, ge=1)
    extra: int | None = Field(None, ge=0)
    extra_groups: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _does_something(self) -> "ReplicateConfiguration":
        if not self.preset and self.replicas is None and self.extra is None and self.extra_groups is None:
            raise ValueError("give preset, replicas, extra or extra_groups")
        return self


class Replicate(SettingsOperator):
    """Sets ``group_size`` and ``extra_replicas`` of the streams that it concerns, ``extra_groups`` of the policies."""

    Configuration: ClassVar[type[OperatorConfiguration]] = ReplicateConfiguration

    def __init__(self, configuration: ReplicateConfiguration) -> None:
        self._given = configuration

    def stream(self, name: str, section: StreamConfig) -> StreamConfig:
        """The stream with its replicas."""
        given = self._given
        extra = PRESETS[given.preset][0] if given.extra is None else given.extra
        update = {"extra_replicas": extra if given.extra is not None or given.preset else section.extra_replicas}
        if given.replicas is not None:
            update["group_size"] = given.replicas
        return section.model_copy(update=update)

    def policy(self, name: str, section: PolicyConfig) -> PolicyConfig:
        """The policy with its spare groups."""
        given = self._given
        if given.extra_groups is None and not given.preset:
            return section
        groups = PRESETS[given.preset][1] if given.extra_groups is None else given.extra_groups
        return section.model_copy(update={"extra_groups": groups})
