"""A trainer that publishes beside its next step: the same versions and weights, also when it is killed in between."""

import signal
from pathlib import Path

from nursery import Nursery
from trainer_feed import Feed, local_broker, make_config, make_model, trainer_arguments

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.open import open_store
from headrace.pipeline.delta_to_worker import verify_chain
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Step


def test_versions_and_weights_are_those_of_a_trainer_that_waits(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    results: dict[str, bytes] = {}
    with local_broker(tmp_path / "broker") as address:
        nursery = Nursery(tmp_path)

        def train(config: RunConfig, trap: tuple[str, int] | None, code: int) -> None:
            trainer = nursery.start(*trainer_arguments(config, address), trap=trap)
            assert trainer.wait(120) == code, trainer.log()

        for name, ahead in (("waits", False), ("ahead", True)):
            config = make_config(model, tmp_path / name, name, publish_ahead=ahead)
            fed = Feed(Connection.of(config.kafka, config.run.id, address), config)
            for number in range(1, 7):
                fed.batch(number)
            fed.end()
            if ahead:
                train(config, ("after-delta", 2), -signal.SIGKILL)
                train(config, ("after-step", 4), -signal.SIGKILL)
            train(config, None, 0)
            steps = [record for record in fed.records("steps") if isinstance(record, Step)]
            assert [(s.batch, s.version) for s in steps] == [(k, k) for k in range(1, 7)]
            if ahead:
                assert all(s.publish_seconds <= s.metrics["publish/seconds"] for s in steps[-2:])
            store = open_store(config.run_folder() / "store")
            assert Chain(store, name, "main").versions() == list(range(7))
            assert not [one.problem for one in verify_chain(store, name, "main") if one.problem]
            results[name] = (config.run_folder() / "model" / "main" / "model.safetensors").read_bytes()
        nursery.close()
    assert results["waits"] == results["ahead"]
