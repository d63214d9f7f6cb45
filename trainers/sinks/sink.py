"""The contract of a sink of metrics, and the names under which a Step's figures are known in the field.

A sink gets numbers by name for every published version; it may fail or hang without any effect on training
(``fan_out``). Sinks are plug-ins of the group ``headrace.sinks``.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Step

__all__ = ("RunInfo", "Sink", "flat_settings", "metrics_of", "required", "said")

_ALIASES = {"mismatch_kl": ("behave_kl/k3", "mismatch/kl"), "seq_len": ("seq_len/mean",)}
"""Names that tools and papers use, from the first of ours that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a sink may want to know. folder: where it may write. settings: of the trainer, flat."""

    project: str
    run: str
    policy: str
    folder: Path
    settings: Mapping[str, str | float | bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """One name for the training of one policy; a resumed run has the same."""
        return f"{self.run}-{self.policy}"


class Sink(Protocol):
    """A place for metrics. Made as ``cls(info, **options)``, options from ``[metrics.options.NAME]``."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of a version. ``step`` only grows, also when a run is resumed. May raise anything."""
        ...

    def close(self) -> None:
        """Hand over what was held back."""
        ...


def metrics_of(step: Step) -> dict[str, float]:
    """The figures of a Step by the field's names, finite ones only.

    ``reward/mean``, ``seq_len``, ``entropy``, ``mismatch_kl``, ``optim/grad_norm``, ``time/wait_for_batch``,
    ``time/step`` and everything else that losses and the trainer report.
    """
    found = {
        **step.metrics,
        "loss": step.loss,
        "batch": float(step.batch),
        "lineage": float(step.lineage),
        "tokens": float(step.tokens),
        "sequences": float(step.sequences),
        "optim/updates": float(step.updates),
        "time/wait_for_batch": step.wait_seconds,
        "time/step": step.step_seconds,
        "time/publish": step.publish_seconds,
        "delta/bytes": float(step.delta_bytes),
        "delta/changed": step.changed_share,
    }
    return said(found)


def said(metrics: Mapping[str, float]) -> dict[str, float]:
    """Finite metrics, with the names of the field for those that have two."""
    found = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    for alias, names in _ALIASES.items():
        value = next((found[name] for name in names if name in found), None)
        if value is not None:
            found.setdefault(alias, value)
    return found


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str | float | bool]:
    """Nested settings as dotted keys; lists and empty values as text.

    >>> flat_settings({"lr": 1e-3, "options": {"bf16": True}, "betas": [0.9, 0.95]})
    {'lr': 0.001, 'options.bf16': True, 'betas': '[0.9, 0.95]'}
    """
    out: dict[str, str | float | bool] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            out.update(flat_settings(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return out


def required(package: str, sink: str, extra: str) -> Any:
    """The package that a sink needs. Raises ConfigurationError that names the extra."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"metrics.sinks has {sink!r}, which needs {package.split('.')[0]} ({error}): "
            f"pip install 'headrace[{extra}]', or take it out of metrics.sinks"
        ) from error
