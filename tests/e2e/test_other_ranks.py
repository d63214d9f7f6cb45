"""A run goes on with another number of ranks, another ZeRO stage and another backend, from the same checkpoints."""

import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
from nursery import Nursery
from trainer_feed import Feed, local_broker, make_config, make_model, trainer_arguments

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.image import load_image
from headrace.connectors.stores.open import open_store
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Step

BATCHES = 9


class Lives:
    """Starts all ranks of a trainer, again and again with other settings."""

    def __init__(self, nursery: Nursery, broker: str) -> None:
        self._nursery, self.broker = nursery, broker

    def feed(self, config: RunConfig) -> Feed:
        """All batches of a run, and their end."""
        fed = Feed(Connection.of(config.kafka, config.run.id, self.broker), config)
        for number in range(1, BATCHES + 1):
            fed.batch(number)
        fed.end()
        return fed

    def live(self, config: RunConfig, trap: tuple[str, int] | None = None) -> str:
        """One life, to the end or to the trap of rank 0; what rank 0 said."""
        ranks = config.trainer_of("main").ranks
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
        started = [
            self._nursery.start(
                *trainer_arguments(config, self.broker),
                trap=trap if rank == 0 else None,
                environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {},
            )
            for rank in range(ranks)
        ]
        codes = [one.wait(240) for one in started]
        said = "\n".join(one.log() for one in started)
        assert codes[0] == (-signal.SIGKILL if trap else 0), said
        assert trap is not None or codes == [0] * ranks, said
        return started[0].log()


def weights_of(config: RunConfig) -> np.ndarray:
    """The last version as one float array."""
    chain = Chain(open_store(config.run_folder() / "store"), config.run.id, "main")
    head = chain.head()
    assert head is not None
    image = load_image(chain, head.version)
    bits = [array.ravel() for array in image.layout.views(image.data).values()]
    return (np.concatenate(bits).astype(np.uint32) << 16).view(np.float32)


def test_one_rank_then_two_then_another_backend(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    shards = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}

    def config(name: str, **trainer: Any) -> RunConfig:
        return make_config(model, tmp_path, name, checkpoint_beside=False, **trainer)

    with local_broker(tmp_path / "broker") as address:
        nursery = Nursery(tmp_path)
        lives = Lives(nursery, address)
        calm = config("calm")
        lives.feed(calm)
        lives.live(calm)
        one = config("moved", backend="deepspeed", zero_stage=1)
        fed = lives.feed(one)
        lives.live(one, trap=("after-step", 4))
        two = config("moved", backend="deepspeed", zero_stage=3, ranks=2, options=shards)
        assert "weights of batch 3, retraining to batch 4" in lives.live(two, trap=("after-step", 7))
        last = config("moved")
        assert "weights of batch 6, retraining to batch 7" in lives.live(last)
        nursery.close()
        steps = [(record.batch, record.version) for record in fed.records("steps") if isinstance(record, Step)]
    assert steps == [(k, k) for k in range(1, BATCHES + 1)]
    start = load_image(Chain(open_store(calm.run_folder() / "store"), "calm", "main"), 0)
    first = np.concatenate([array.ravel() for array in start.layout.views(start.data).values()])
    moved = weights_of(calm) - (first.astype(np.uint32) << 16).view(np.float32)
    assert np.linalg.norm(weights_of(calm) - weights_of(last)) < 0.05 * np.linalg.norm(moved)
