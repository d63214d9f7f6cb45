"""A trainer of two ranks under ZeRO 3: each publishes its shards, and whichever is killed where, the run goes on."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from trainer_feed import Feed, local_broker, make_config, make_model, trainer_arguments

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.image import load_image
from headrace.connectors.stores.open import open_store
from headrace.pipeline.delta_to_worker import verify_chain
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Step

RANKS = 2
SHARDED = {
    "backend": "deepspeed",
    "zero_stage": 3,
    "ranks": RANKS,
    "full_every": 4,
    # Without it DeepSpeed keeps tensors as small as these whole on every rank.
    "options": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
}


class Ring:
    """Starts both ranks of a trainer as torchrun would."""

    def __init__(self, nursery: Nursery, broker: str) -> None:
        self._nursery, self.broker = nursery, broker

    def train(self, config: RunConfig, trap: tuple[str, int] | None = None, rank: int = 0) -> list[int]:
        """Run to the end, or to the trap that is set for ``rank``; the exit codes."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SEGMENT_BYTES": "4096"}
        arguments = trainer_arguments(config, self.broker)
        ranks = [
            self._nursery.start(
                *arguments,
                trap=trap if number == rank else None,
                environment={**shared, "RANK": str(number), "LOCAL_RANK": str(number)},
            )
            for number in range(RANKS)
        ]
        codes = [one.wait(120) for one in ranks]
        if trap is None:
            assert codes == [0, 0], "\n".join(one.log() for one in ranks)
        else:
            assert codes[rank] == -signal.SIGKILL, ranks[rank].log()
        return codes


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    pytest.importorskip("deepspeed")
    with local_broker(tmp_path_factory.mktemp("broker")) as address:
        nursery = Nursery(tmp_path_factory.mktemp("logs"))
        yield Ring(nursery, address)
        nursery.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def fed(ring: Ring, config: RunConfig, batches: int) -> Feed:
    feed = Feed(Connection.of(config.kafka, config.run.id, ring.broker), config)
    for number in range(1, batches + 1):
        feed.batch(number)
    feed.end()
    return feed


def checked(config: RunConfig, feed: Feed, batches: int) -> dict[str, Any]:
    """Every batch has one Step, every version verifies, both ranks wrote; the exported model is the head."""
    import torch
    from safetensors.torch import load_file

    steps = [record for record in feed.records("steps") if isinstance(record, Step)]
    assert [step.batch for step in steps] == list(range(1, batches + 1))
    store, run = open_store(config.run_folder() / "store"), config.run.id
    chain = Chain(store, run, "main")
    head = chain.versions()[-1]
    assert steps[-1].version == head
    assert not [one.problem for one in verify_chain(store, run, "main") if one.problem]
    for kind, version in (("full", 0), ("delta", head)):
        keys = [info.key for info in store.list(f"runs/{run}/main/{kind}/{version}/")]
        assert {key.rpartition("/")[2] for key in keys} >= {"r0.bin", "r1.bin"}
    image = load_image(chain, head)
    exported = load_file(config.run_folder() / "model" / "main" / "model.safetensors")
    weights = image.layout.views(image.data)
    for name, bits in weights.items():
        assert exported[name].view(torch.uint16).numpy().tobytes() == bits.tobytes(), name
    return {name: bits.copy() for name, bits in weights.items()}


@pytest.fixture(scope="module")
def undisturbed(ring: Ring, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    config = make_config(model, tmp_path_factory.mktemp("undisturbed"), "sharded", **SHARDED)
    feed = fed(ring, config, 5)
    ring.train(config)
    return checked(config, feed, 5)


@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "beside the next step"])
def test_ranks_that_are_killed_in_mid_publish_go_on(
    ring: Ring, model: Path, tmp_path: Path, undisturbed: dict[str, Any], ahead: bool
) -> None:
    """Checkpoints at 3 and 5. Killed: rank 1 before and after its upload, rank 0 with the version committed."""
    name = "sharded-ahead" if ahead else "sharded-killed"
    config = make_config(model, tmp_path, name, **{**SHARDED, "publish_ahead": ahead})
    feed = fed(ring, config, 5)
    first = ("after-upload", 2, 1) if ahead else ("before-upload", 1, 1)
    for point, batch, rank in (first, ("after-delta", 4, 0)):
        codes = ring.train(config, (point, batch), rank)
        assert codes[1 - rank] not in (0, -signal.SIGKILL), "the other rank ends by itself, with an error"
    ring.train(config)
    found = checked(config, feed, 5)
    store = open_store(config.run_folder() / "store")
    assert Chain(store, name, "main").versions() == list(range(6))
    for tensor, bits in undisturbed.items():
        assert (found[tensor] != bits).mean() < 0.01, "DeepSpeed repeats itself up to roundings"
