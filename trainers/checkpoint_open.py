"""Opens the checkpoints of a policy where its configuration wants them: a shared folder or an object store."""

from pathlib import Path

from headrace.connectors.checkpoints import checkpoint_prefix
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.stores.open import open_store
from headrace.connectors.stores.store import ObjectStore
from headrace.schemas.config import RunConfig
from headrace.trainers.backends.backend import Backend
from headrace.trainers.checkpoint import Place
from headrace.trainers.checkpoint_folder import FolderPlace
from headrace.trainers.checkpoint_saver import Checkpoints
from headrace.trainers.checkpoint_store import StorePlace
from headrace.trainers.ranks import Ranks

__all__ = ("open_checkpoints", "open_place")


def open_checkpoints(
    config: RunConfig, policy: str, store: ObjectStore, backend: Backend, ranks: Ranks, stop: StopSignal
) -> Checkpoints:
    """The checkpoints of a policy, as ``[trainer]`` wants them. store: the run's. Raises StoreRefused."""
    trainer = config.trainer_of(policy)
    return Checkpoints(
        open_place(config, policy, store),
        backend,
        ranks,
        stop,
        keep=trainer.keep_checkpoints,
        keep_every=trainer.keep_checkpoint_every,
        beside=trainer.checkpoint_beside,
    )


def open_place(config: RunConfig, policy: str, store: ObjectStore, scratch: Path | None = None) -> Place:
    """Where they lie (``trainer.checkpoint_url``). store: the run's. scratch: for what is fetched from a store, another
    folder than the run's own.
    """
    folder, url = config.run_folder(), config.trainer_of(policy).checkpoint_url
    own = folder / "checkpoints" / policy
    if not url:
        return FolderPlace(own)
    kept = store if url == "store" else open_store(config.store.model_copy(update={"url": url}), folder)
    return StorePlace(kept, checkpoint_prefix(config.run.id, policy), scratch or own)
