"""More of a prompt than its group needs, and more groups than a batch needs, so that slow or broken ones are spared.

Every replica of a prompt is a task of its own and goes to whichever worker has room (prompt replication of ROLL Flash).
`extra` replicas beyond the group's size let a group close with the first that are usable; `extra_groups` let a batch be
filled by the first groups. Both keep what finishes early, which are the short answers, and are off unless asked for
(protocol 5). Presets are for environments that fail or hang:

| preset | spare replicas | spare groups | 5 % stop | none stops |
|---|---|---|---|---|
| none | 0 | 0 | 243 s, 1.05 | 68 s, 1.00 |
| `flaky` | 1 | 2 | 99 s, 1.20 | 57 s, 1.20 |
| `roll_flash` | half a group | an eighth of a batch | 49 s, 1.69 | 48 s, 1.69 |

The figures are seconds a step and episodes started for each trained one, of 32 groups of 8 with environments of which
5 % or none stop (`headrace simulate paper fig10`, means of 5 seeds); `roll_flash` is the 36 x 12 of ROLL Flash, Figure
10 (arXiv 2510.11345, 5.2.2).
"""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_operator import SettingsOperator
from headrace.schemas.config import PolicyConfig, RunConfig, StreamConfig
from headrace.schemas.errors import ConfigurationError

__all__ = ("Replicate", "ReplicateConfiguration")

PRESETS: Mapping[str, tuple[Callable[[int], int], Callable[[int], int]]] = {
    "flaky": (lambda size: 1, lambda batch: 2),
    "roll_flash": (lambda size: math.ceil(size / 2), lambda batch: math.ceil(batch / 8)),
}
"""Spare replicas by the size of a group, spare groups by the groups of a batch."""


class ReplicateConfiguration(OperatorConfiguration):
    """``preset``: ``flaky``, ``roll_flash``, or none. ``replicas``: group size; unset, the stream's own. ``extra``:
    tasks beyond it. ``extra_groups``: groups beyond what batches need. What is set here goes before the preset; an
    ``extra_replicas`` or ``extra_groups`` of the stream or policy that contradicts the preset is refused.
    """

    preset: Literal["", "flaky", "roll_flash"] = ""
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
        self._batches: dict[str, int] = {}

    def look_at(self, config: RunConfig) -> None:
        """Groups of a batch, by policy."""
        self._batches = {name: config.trainer_of(name).batch_groups for name in config.policies}

    def stream(self, name: str, section: StreamConfig) -> StreamConfig:
        """The stream with its replicas. Raises ConfigurationError where it contradicts the preset."""
        given = self._given
        size, spare = given.replicas or section.group_size, section.extra_replicas
        if given.extra is not None:
            spare = given.extra
        elif given.preset:
            spare = self._preset(f"streams.{name}.extra_replicas", "extra", spare, PRESETS[given.preset][0](size))
        return section.model_copy(update={"group_size": size, "extra_replicas": spare})

    def policy(self, name: str, section: PolicyConfig) -> PolicyConfig:
        """The policy with its spare groups. Raises ConfigurationError where it contradicts the preset."""
        given, spare = self._given, section.extra_groups
        if given.extra_groups is not None:
            spare = given.extra_groups
        elif given.preset:
            groups = PRESETS[given.preset][1](self._batches[name])
            spare = self._preset(f"policies.{name}.extra_groups", "extra_groups", spare, groups)
        return section.model_copy(update={"extra_groups": spare})

    def _preset(self, key: str, own: str, there: int, preset: int) -> int:
        """The preset's number, unless another one was asked for beside it."""
        if there not in (0, preset):
            raise ConfigurationError(
                f"{key} is {there}, and preset {self._given.preset!r} of replicate makes it {preset}: take the key "
                f"out, or say in the operator what is meant ({own} = {there})"
            )
        return preset
