"""Which store, run and policy the arguments of `headrace deltas` mean.

A run folder or a store URL in; an open store with run id, policy and model folder out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.connectors.stores.chain import Chain
    from headrace.connectors.stores.store import ObjectStore

__all__ = ("Place", "Policy", "RunId", "Where", "number_of", "place_of")

Where = Annotated[str, typer.Argument(help="A run folder, a store folder, or s3://bucket/prefix.")]
RunId = Annotated[str, typer.Option("--run", help="Run id, where the store holds several.")]
Policy = Annotated[str, typer.Option(help="Policy, where the run has several.")]


@dataclass(frozen=True, slots=True)
class Place:
    """A policy in a store; model: the folder of its initial model, where the run names one. folder: the run's."""

    store: "ObjectStore"
    run: str
    policy: str
    model: Path | None
    folder: Path | None


def number_of(chain: "Chain", version: int, place: Place) -> int:
    """The version meant: -1 is the newest. Raises ConfigurationError when it is not committed."""
    from headrace.connectors.stores.store import exists

    head = chain.head_version()
    if head < 0:
        raise ConfigurationError(f"{place.store.url}: nothing is committed under runs/{place.run}/{place.policy}")
    if version < -1 or (version >= 0 and not exists(place.store, chain.keys.manifest(version))):
        raise ConfigurationError(
            f"{place.store.url}: {place.run}/{place.policy} has no version {version}; {head} is the newest"
        )
    return head if version < 0 else version


def place_of(where: str, run: str, policy: str) -> Place:
    """The store, run and policy that the arguments mean. Raises ConfigurationError when they are not clear."""
    from headrace.connectors.stores.open import open_store

    folder = Path(where)
    if (folder / "config.json").is_file():
        return _place_of_run(folder, policy)
    if "://" not in where and not folder.is_dir():
        raise ConfigurationError(f"{where} is neither a run folder nor a store: no such folder")
    store = open_store(where)
    found = sorted(
        {(parts[1], parts[2]) for info in store.list("runs/") if "manifest" in (parts := info.key.split("/"))}
    )
    fits = [(r, p) for r, p in found if run in ("", r) and policy in ("", p)]
    if len(fits) != 1:
        names = ", ".join(f"--run {r} --policy {p}" for r, p in found) or "no version of any policy"
        raise ConfigurationError(f"{store.url} holds {names}; {len(fits)} fit the arguments, name one")
    return Place(store, *fits[0], None, None)


def _place_of_run(folder: Path, policy: str) -> Place:
    from headrace.connectors.stores.open import open_store
    from headrace.schemas.config import read_config

    config = read_config(folder / "config.json")
    names = config.policy_names()
    if (policy and policy not in names) or (not policy and len(names) != 1):
        raise ConfigurationError(f"{folder} has the policies {', '.join(names)}: name one with --policy")
    name = policy or names[0]
    if not config.store.url and not (folder / "store").is_dir():
        raise ConfigurationError(f"{folder} has no store folder: the run has published nothing yet")
    model = Path(config.policies[name].model)
    return Place(open_store(config.store, folder), config.run.id, name, model if model.is_dir() else None, folder)
