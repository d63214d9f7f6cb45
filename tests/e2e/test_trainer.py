"""The trainer as a process on the local broker: killed anywhere it goes on, and every batch is trained once."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_feed import Feed, local_broker, make_config, make_model, trainer_process

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.open import open_store
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import EXIT_CONFIGURATION, EXIT_SUPERSEDED
from headrace.schemas.records import Head, Resumed, Rollback, Step, Stop

KILLED = Path(__file__).parents[1] / "kit" / "killed_trainer.py"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with local_broker(tmp_path_factory.mktemp("broker")) as address:
        yield address


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def feed(config: RunConfig, broker: str, batches: int) -> Feed:
    feed = Feed(Connection.of(config.kafka, config.run.id, broker), config)
    for number in range(1, batches + 1):
        feed.batch(number)
    return feed


def train(config: RunConfig, broker: str, *more: str, code: int = 0) -> str:
    """Run a trainer to its end; its log."""
    process = trainer_process(config, broker, *more)
    log = process.communicate(timeout=180)[1]
    assert process.returncode == code, log
    return str(log)


def killed(config: RunConfig, broker: str, point: str, batch: int, *more: str) -> str:
    """Run a trainer that dies at a point of a batch."""
    process = trainer_process(config, broker, *more, program=[str(KILLED), point, str(batch)])
    log = process.communicate(timeout=180)[1]
    assert process.returncode == -signal.SIGKILL, log
    return str(log)


def weights_of(config: RunConfig) -> bytes:
    return (config.run_folder() / "model" / "main" / "model.safetensors").read_bytes()


def steps_of(feed: Feed) -> list[tuple[int, int]]:
    return [(r.batch, r.version) for r in feed.records("steps") if isinstance(r, Step)]


@pytest.fixture(scope="module")
def undisturbed(broker: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Feed]:
    config = make_config(model, tmp_path_factory.mktemp("undisturbed"), "undisturbed")
    fed = feed(config, broker, 8)
    fed.end()
    train(config, broker)
    return config, fed


def test_every_batch_becomes_a_version(undisturbed: tuple[RunConfig, Feed]) -> None:
    config, fed = undisturbed
    assert steps_of(fed) == [(k, k) for k in range(1, 9)]
    last = fed.records("steps")[-1]
    assert isinstance(last, Stop) and last.reason == "epochs"
    heads = [r.version for r in fed.records("deltas") if isinstance(r, Head)]
    assert heads[-1] == 8
    chain = Chain(open_store(config.run_folder() / "store"), config.run.id, "main")
    assert chain.versions() == list(range(9))
    step = fed.records("steps")[0]
    assert isinstance(step, Step) and step.metrics["reward/mean"] > 0 and step.step_seconds > 0
    group = fed.connection.consumer("look", group=f"{config.run.id}.trainer.main")
    from confluent_kafka import TopicPartition

    places = [TopicPartition(fed.connection.topic("batches.main"), lane) for lane in range(config.run.lanes)]
    assert all(place.offset > 0 for place in group.committed(places, timeout=10))
    group.close()


def test_the_exported_model_is_the_last_version(undisturbed: tuple[RunConfig, Feed]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from headrace.connectors.stores.image import load_image

    config, _ = undisturbed
    exported = AutoModelForCausalLM.from_pretrained(config.run_folder() / "model" / "main", dtype=torch.bfloat16)
    image = load_image(Chain(open_store(config.run_folder() / "store"), config.run.id, "main"), 8)
    parameters = dict(exported.named_parameters())
    for name, bits in image.layout.views(image.data).items():
        assert torch.equal(parameters[name].detach().view(torch.uint16), torch.from_numpy(bits.copy())), name


def test_after_stop_a_restart_ends_at_once(broker: str, undisturbed: tuple[RunConfig, Feed]) -> None:
    config, fed = undisturbed
    before = len(fed.records("steps"))
    assert "stopped" in train(config, broker)
    assert len(fed.records("steps")) == before
    assert "stopped" in train(config, broker, "--resume-from", "3", code=EXIT_CONFIGURATION)


def test_killed_at_every_phase_no_batch_is_trained_twice_or_lost(
    broker: str, model: Path, tmp_path: Path, undisturbed: tuple[RunConfig, Feed]
) -> None:
    """Checkpoints at 3 and 6; the weights end bit-equal to those of the run that nobody disturbed."""
    config = make_config(model, tmp_path, "killed")
    fed = feed(config, broker, 8)
    fed.end()
    killed(config, broker, "after-delta", 0)
    killed(config, broker, "after-delta", 2)
    killed(config, broker, "in-checkpoint", 3)
    killed(config, broker, "after-checkpoint", 3)
    killed(config, broker, "after-delta", 5)
    killed(config, broker, "after-step", 7)
    train(config, broker)
    assert steps_of(fed) == [(k, k) for k in range(1, 9)]
    assert Chain(open_store(config.run_folder() / "store"), "killed", "main").versions() == list(range(9))
    assert weights_of(config) == weights_of(undisturbed[0])


def test_deepspeed_goes_on_too(broker: str, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, "killed-deepspeed", backend="deepspeed")
    fed = feed(config, broker, 5)
    fed.end()
    killed(config, broker, "after-delta", 4)
    assert "retraining to batch 4" in train(config, broker)
    assert steps_of(fed) == [(k, k) for k in range(1, 6)]


def test_going_back_starts_a_lineage_and_publishes_the_old_weights_again(
    broker: str, model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path, "back", keep_checkpoints=3)
    fed = feed(config, broker, 5)
    killed(config, broker, "after-step", 5)
    killed(config, broker, "after-rollback", 0, "--resume-from", "4")
    fed.end()
    train(config, broker)
    records = fed.records("steps")
    back = next(r for r in records if isinstance(r, Rollback))
    assert (back.lineage, back.base_lineage, back.base_batch, back.base_version) == (1, 0, 3, 3)
    again = next(r for r in records if isinstance(r, Resumed))
    assert (again.lineage, again.batch, again.version) == (1, 3, 6)
    after = [(r.batch, r.version, r.lineage) for r in records[records.index(again) :] if isinstance(r, Step)]
    assert after == [(4, 7, 1), (5, 8, 1)]
    chain = Chain(open_store(config.run_folder() / "store"), "back", "main")
    assert chain.committed(6).root_digest == chain.committed(3).root_digest
    assert isinstance(records[-1], Stop)


def test_a_successor_fences_the_trainer_before(broker: str, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, "fenced")
    fed = feed(config, broker, 2)
    old = trainer_process(config, broker)
    wait_for(fed, 2)
    os.kill(old.pid, signal.SIGSTOP)
    new = trainer_process(config, broker)
    fed.batch(3)
    wait_for(fed, 3)
    os.kill(old.pid, signal.SIGCONT)
    assert old.wait(60) == EXIT_SUPERSEDED, old.stderr.read()
    fed.end()
    assert new.wait(60) == 0, new.stderr.read()
    assert steps_of(fed) == [(1, 1), (2, 2), (3, 3)]


def test_a_stop_signal_ends_it_at_once_and_it_goes_on_later(broker: str, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, "signalled", max_steps=3)
    fed = feed(config, broker, 2)
    process = trainer_process(config, broker)
    wait_for(fed, 2)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, process.stderr.read()
    assert time.monotonic() - began < 5
    fed.batch(3)
    train(config, broker)
    assert steps_of(fed) == [(1, 1), (2, 2), (3, 3)]
    assert isinstance(fed.records("steps")[-1], Stop)


def test_asynchronous_data_without_a_correction_is_refused(broker: str, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, "refused", loss_options={"behave": {"action": "off"}})
    feed(config, broker, 0)
    assert "does not correct" in train(config, broker, code=EXIT_CONFIGURATION)


def wait_for(fed: Feed, batch: int) -> None:
    """Wait until the Step of a batch is written."""
    for _ in range(600):
        if steps_of(fed)[-1:] and steps_of(fed)[-1][0] >= batch:
            return
        time.sleep(0.1)
    raise AssertionError(f"no Step of batch {batch}: {steps_of(fed)}")


def test_an_outage_of_the_broker_ends_nobody(model: Path, tmp_path: Path) -> None:
    """The broker goes away between two batches and comes back."""
    config = make_config(model, tmp_path, "outage")
    with local_broker(tmp_path / "b") as address:
        fed = feed(config, address, 2)
        process = trainer_process(config, address)
        wait_for(fed, 2)
    time.sleep(2)
    with local_broker(tmp_path / "b", port=int(address.rpartition(":")[2])):
        fed = Feed(Connection.of(config.kafka, config.run.id, address), config)
        fed.batch(3)
        fed.end()
        assert process.wait(90) == 0, process.stderr.read()
        assert steps_of(fed) == [(1, 1), (2, 2), (3, 3)]


def test_a_broker_that_stood_still_longer_than_the_transaction_timeout(model: Path, tmp_path: Path) -> None:
    """The open transaction is aborted by the broker; the trainer takes a new producer and goes on."""
    config = make_config(model, tmp_path, "frozen")
    with local_broker(tmp_path / "b") as address:
        fed = feed(config, address, 2)
        process = trainer_process(config, address, program=[str(KILLED.with_name("stalled_trainer.py")), "2", "12"])
        wait_for(fed, 2)
        fed.end()
        log = process.communicate(timeout=90)[1]
        assert process.returncode == 0, log
        assert "again in 1 s" in log
        assert steps_of(fed) == [(1, 1), (2, 2)]
