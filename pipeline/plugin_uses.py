"""Which plug-ins a configuration names, where, and with which settings; and whether they can work.

In: a configuration and a kind. Out: each use with the object behind it. A use that cannot work is refused by the key
that says it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from headrace.connectors.plugins import load
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError

__all__ = ("Use", "check_uses", "uses_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A plug-in of a kind, the key that names it, and the settings that it is given under ``options_key``."""

    kind: str
    where: str
    name: str
    options_key: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def uses_of(config: RunConfig, kind: str) -> Iterator[Use]:
    """Where a configuration names plug-ins of a kind. Raises ConfigurationError for a kind that it cannot name."""
    if kind == "engines":
        yield Use(kind=kind, where="rollout.engine", name=config.rollout.engine, options_key="rollout.options",
                  options=config.rollout.options)  # fmt: skip
    elif kind in ("losses", "advantages"):
        one = {"losses": "loss", "advantages": "advantage"}[kind]
        for policy in config.policies:
            trainer = config.trainer_of(policy)
            key = f"policies.{policy}.trainer.{one}" if one in config.policies[policy].trainer else f"trainer.{one}"
            options = getattr(trainer, f"{one}_options")
            yield Use(kind=kind, where=key, name=getattr(trainer, one), options_key=f"{key}_options", options=options)
    elif kind in ("workflows", "rewards", "datasets", "environments"):
        for stream, section in config.streams.items():
            yield from _of_stream(kind, f"streams.{stream}", section)
    else:
        raise ConfigurationError(f"a configuration names no {kind}")


def _of_stream(kind: str, where: str, section: Any) -> Iterator[Use]:
    if kind == "workflows":
        options = getattr(section, "workflow_options", {})
        yield Use(kind=kind, where=f"{where}.workflow", name=section.workflow, options_key=f"{where}.workflow_options",
                  options=options)  # fmt: skip
    elif kind == "rewards":
        for key in ("reward", "group_reward"):
            if name := getattr(section, key, ""):
                yield Use(kind=kind, where=f"{where}.{key}", name=name, options_key=f"{where}.{key}_options",
                          options=getattr(section, f"{key}_options"))  # fmt: skip
    elif kind == "environments":
        options = getattr(section, "workflow_options", {})
        if name := options.get("environment"):
            key = f"{where}.workflow_options.environment"
            yield Use(kind=kind, where=key, name=name, options_key=f"{key}_options",
                      options=options.get("environment_options", {}))  # fmt: skip
    elif section.format != "auto":
        yield Use(kind=kind, where=f"{where}.format", name=section.format)


def check_uses(config: RunConfig, kind: str) -> list[tuple[Use, str]]:
    """Every use with ``module:name`` of the object behind it.

    Raises ConfigurationError for a name that there is not, an import that fails, and settings that are refused.
    """
    return [(use, _checked(use)) for use in uses_of(config, kind)]


def _checked(use: Use) -> str:
    try:
        found = load(f"headrace.{use.kind}", use.name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{use.where}: {error}") from error
    model = getattr(found, "Options", None)
    if isinstance(model, type) and issubclass(model, BaseModel):
        try:
            model.model_validate(dict(use.options))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join((use.options_key, *map(str, first["loc"])))
            valid = ", ".join(model.model_fields) or "no key"
            raise ConfigurationError(f"{key}: {first['msg']}; {use.name} knows {valid}") from error
    return f"{found.__module__}:{getattr(found, '__qualname__', use.name)}"
