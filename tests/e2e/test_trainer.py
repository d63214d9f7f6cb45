"""The trainer as a process on the local broker: killed anywhere it goes on, and every batch is trained once."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nursery import Nursery, Trainer
from trainer_feed import Feed, local_broker, make_config, make_items, make_model, trainer_arguments

from headrace.connectors.blobs import put_sequences
from headrace.connectors.kafka import Connection
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.open import open_store
from headrace.schemas.codec import encode
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import EXIT_CONFIGURATION, EXIT_SUPERSEDED
from headrace.schemas.records import Head, Partial, Resumed, Rollback, RunManifest, Step, Stop


class Bench:
    """Starts trainers of policy ``main`` against a broker."""

    def __init__(self, nursery: Nursery, broker: str) -> None:
        self.nursery, self.broker = nursery, broker

    def start(
        self,
        config: RunConfig,
        *more: str,
        trap: tuple[str, int] | None = None,
        broker: str = "",
        policy: str = "main",
    ) -> Trainer:
        """A trainer that runs."""
        arguments = trainer_arguments(config, broker or self.broker, *more, policy=policy)
        return self.nursery.start(*arguments, trap=trap)

    def train(self, config: RunConfig, *more: str, code: int = 0, policy: str = "main") -> str:
        """Run a trainer to its end; its log."""
        trainer = self.start(config, *more, policy=policy)
        assert trainer.wait(120) == code, trainer.log()
        return trainer.log()

    def killed(self, config: RunConfig, point: str, batch: int, *more: str) -> None:
        """Run a trainer that dies at a point of a batch."""
        trainer = self.start(config, *more, trap=(point, batch))
        assert trainer.wait(120) == -signal.SIGKILL, trainer.log()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with local_broker(tmp_path_factory.mktemp("broker")) as address:
        nursery = Nursery(tmp_path_factory.mktemp("logs"))
        yield Bench(nursery, address)
        nursery.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def feed(config: RunConfig, broker: str, batches: int) -> Feed:
    feed = Feed(Connection.of(config.kafka, config.run.id, broker), config)
    for number in range(1, batches + 1):
        feed.batch(number)
    return feed


def weights_of(config: RunConfig) -> bytes:
    return (config.run_folder() / "model" / "main" / "model.safetensors").read_bytes()


def steps_of(feed: Feed) -> list[tuple[int, int]]:
    return [(r.batch, r.version) for r in feed.records("steps") if isinstance(r, Step)]


@pytest.fixture(scope="module")
def undisturbed(bench: Bench, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Feed]:
    config = make_config(model, tmp_path_factory.mktemp("undisturbed"), "undisturbed")
    fed = feed(config, bench.broker, 8)
    fed.end()
    bench.train(config)
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


def test_after_stop_a_restart_ends_at_once(bench: Bench, undisturbed: tuple[RunConfig, Feed]) -> None:
    config, fed = undisturbed
    before = len(fed.records("steps"))
    assert "stopped" in bench.train(config)
    assert len(fed.records("steps")) == before
    assert "stopped" in bench.train(config, "--resume-from", "3", code=EXIT_CONFIGURATION)


def test_killed_at_every_phase_no_batch_is_trained_twice_or_lost(
    bench: Bench, model: Path, tmp_path: Path, undisturbed: tuple[RunConfig, Feed]
) -> None:
    """Checkpoints at 3 and 6; the weights end bit-equal to those of the run that nobody disturbed."""
    config = make_config(model, tmp_path, "killed")
    fed = feed(config, bench.broker, 8)
    fed.end()
    bench.killed(config, "after-delta", 0)
    bench.killed(config, "after-delta", 2)
    bench.killed(config, "in-checkpoint", 3)
    bench.killed(config, "before-checkpoint", 6)
    bench.killed(config, "after-delta", 7)
    bench.killed(config, "after-step", 8)
    bench.train(config)
    assert steps_of(fed) == [(k, k) for k in range(1, 9)]
    assert Chain(open_store(config.run_folder() / "store"), "killed", "main").versions() == list(range(9))
    assert weights_of(config) == weights_of(undisturbed[0])


def test_deepspeed_goes_on_too(bench: Bench, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, "killed-deepspeed", backend="deepspeed")
    fed = feed(config, bench.broker, 5)
    fed.end()
    bench.killed(config, "after-delta", 4)
    assert "retraining to batch 4" in bench.train(config)
    assert steps_of(fed) == [(k, k) for k in range(1, 6)]


def test_going_back_starts_a_lineage_and_publishes_the_old_weights_again(
    bench: Bench, model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path, "back", keep_checkpoints=3)
    fed = feed(config, bench.broker, 5)
    bench.killed(config, "after-step", 5)
    bench.killed(config, "after-rollback", 0, "--resume-from", "4")
    fed.end()
    bench.train(config)
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


def test_a_successor_fences_the_trainer_before(bench: Bench, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, "fenced")
    fed = feed(config, bench.broker, 2)
    old = bench.start(config)
    wait_for(fed, 2)
    os.kill(old.pid, signal.SIGSTOP)
    new = bench.start(config)
    fed.batch(3)
    wait_for(fed, 3)
    os.kill(old.pid, signal.SIGCONT)
    assert old.wait(60) == EXIT_SUPERSEDED, old.log()
    fed.end()
    assert new.wait(60) == 0, new.log()
    assert steps_of(fed) == [(1, 1), (2, 2), (3, 3)]


def test_a_stop_signal_ends_it_at_once_and_it_goes_on_later(bench: Bench, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, "signalled", max_steps=3)
    fed = feed(config, bench.broker, 2)
    process = bench.start(config)
    wait_for(fed, 2)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, process.log()
    assert time.monotonic() - began < 5
    fed.batch(3)
    bench.train(config)
    assert steps_of(fed) == [(1, 1), (2, 2), (3, 3)]
    assert isinstance(fed.records("steps")[-1], Stop)


def test_asynchronous_data_without_a_correction_is_refused(bench: Bench, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, "refused", loss_options={"behave": {"action": "off"}})
    feed(config, bench.broker, 0)
    assert "does not correct" in bench.train(config, code=EXIT_CONFIGURATION)


def wait_for(fed: Feed, batch: int) -> None:
    """Wait until the Step of a batch is written."""
    for _ in range(600):
        if steps_of(fed)[-1:] and steps_of(fed)[-1][0] >= batch:
            return
        time.sleep(0.1)
    raise AssertionError(f"no Step of batch {batch}: {steps_of(fed)}")


def test_an_outage_of_the_broker_ends_nobody(bench: Bench, model: Path, tmp_path: Path) -> None:
    """The broker goes away between two batches and comes back."""
    config = make_config(model, tmp_path, "outage")
    with local_broker(tmp_path / "b") as address:
        fed = feed(config, address, 2)
        process = bench.start(config, broker=address)
        wait_for(fed, 2)
    time.sleep(2)
    with local_broker(tmp_path / "b", port=int(address.rpartition(":")[2])):
        fed = Feed(Connection.of(config.kafka, config.run.id, address), config)
        fed.batch(3)
        fed.end()
        assert process.wait(90) == 0, process.log()
        assert steps_of(fed) == [(1, 1), (2, 2), (3, 3)]


def test_a_trainer_that_stood_still_longer_than_the_transaction_timeout(
    bench: Bench, model: Path, tmp_path: Path
) -> None:
    """The open transaction is aborted by the broker; the trainer takes a new producer and goes on."""
    config = make_config(model, tmp_path, "frozen")
    with local_broker(tmp_path / "b") as address:
        fed = feed(config, address, 2)
        process = bench.start(config, trap=("stall", 2), broker=address)
        wait_for(fed, 2)
        fed.end()
        assert process.wait(90) == 0, process.log()
        assert "again in 1 s" in process.log()
        assert steps_of(fed) == [(1, 1), (2, 2)]


def test_each_policy_has_a_trainer_of_its_own(bench: Bench, model: Path, tmp_path: Path) -> None:
    """The second policy's trainer reads and writes its own partitions; the first one's are untouched."""
    config = make_config(model, tmp_path, "policies", lr=1e-3)
    config = config.model_copy(update={"policies": {**config.policies, "second": config.policies["main"]}})
    connection = Connection.of(config.kafka, config.run.id, bench.broker)
    fed = Feed(connection, config, "second")
    for batch in (1, 2):
        fed.batch(batch)
    fed.end()
    bench.train(config, policy="second")
    places = [(raw.partition, type(raw.decoded()).__name__) for raw in connection.read_topic("steps")]
    assert places == [(1, "Step"), (1, "Step"), (1, "Stop")]
    assert {raw.partition for raw in connection.read_topic("deltas")} == {1}
    chain = Chain(open_store(config.run_folder() / "store"), config.run.id, "second")
    assert chain.versions() == [0, 1, 2]
    assert (config.run_folder() / "model" / "second" / "model.safetensors").is_file()


def test_errors_that_a_person_has_to_cure_end_it_at_once(bench: Bench, model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, "wrong")
    fed = feed(config, bench.broker, 0)
    assert "policies are main" in bench.train(config, policy="mian", code=EXIT_CONFIGURATION)
    other = RunManifest(run="wrong", created_ms=1, tokenizer_digest="0" * 64, policies=["main"])
    fed.connection.produce(fed.producer_of_run(), "run", encode(other), key=b"manifest")
    fed.producer_of_run().flush(10)
    assert "tokenizer" in bench.train(config, code=EXIT_CONFIGURATION)
    unknown = make_config(model, tmp_path, "never-created")
    assert "does not exist" in bench.train(unknown, code=EXIT_CONFIGURATION)


def test_large_trajectories_are_fetched_from_the_store(bench: Bench, model: Path, tmp_path: Path) -> None:
    """Batch 1 lies in the topic, batch 2 (the same trajectories) in the store."""
    config = make_config(model, tmp_path, "blobs", max_steps=2)
    fed = feed(config, bench.broker, 1)
    store = open_store(config.run_folder() / "store")
    offloaded = []
    for item in make_items(1, groups=4, size=4, version=0, seed=0):
        holder = Partial(
            group=item.group,
            replica=item.replica,
            attempt=0,
            worker="rollout-0",
            incarnation=1,
            written_ms=1,
            sequences=item.sequences,
        )
        offloaded.append(replace(item, batch=2, sequences=[], blob=put_sequences(store, "blobs", holder)))
    fed.write(2, offloaded, range(config.run.lanes))
    bench.train(config)
    first, second = (r for r in fed.records("steps") if isinstance(r, Step))
    assert second.metrics["seq_len/mean"] == first.metrics["seq_len/mean"]
    assert second.metrics["optim/grad_norm"] == pytest.approx(first.metrics["optim/grad_norm"], rel=0.5)


def test_records_of_strangers_are_passed_over(bench: Bench, model: Path, tmp_path: Path) -> None:
    """Garbage, a null value and a broken record of ours in every topic that a trainer reads, also at a restart."""
    config = make_config(model, tmp_path, "strangers", max_steps=2)
    fed = feed(config, bench.broker, 1)
    producer = fed.connection.producer("stranger")
    broken = encode(Stop(reason="no", policy=0))[:-1]
    for topic in ("run", "steps", "manifests", "batches.main", "deltas"):
        for value in (b"garbage", None, broken):
            producer.produce(fed.connection.topic(topic), value, key=b"k", partition=0)
    producer.flush(10)
    fed.batch(2)
    bench.killed(config, "after-step", 1)
    log = bench.train(config)
    assert "passed over strangers.manifests[0]@" in log and "passed over strangers.batches.main[0]@" in log
    assert len([raw for raw in fed.connection.read_topic("steps") if isinstance(raw.decoded_if_ours(), Step)]) == 2


def test_two_ranks_read_their_own_lanes(bench: Bench, model: Path, tmp_path: Path) -> None:
    """All groups lie in lanes of rank 1; rank 0 has nothing to train and still publishes."""
    config = make_config(model, tmp_path, "ranks", backend="deepspeed", zero_stage=1, ranks=2)
    fed = feed(config, bench.broker, 0)
    for batch in (1, 2):
        fed.batch(batch, lanes=[1, 3])
    fed.end()
    for rank in bench.nursery.start_ranks(2, *trainer_arguments(config, bench.broker)):
        assert rank.wait(180) == 0, rank.log()
    assert steps_of(fed) == [(1, 1), (2, 2)]
    assert all(r.metrics["optim/grad_norm"] > 0 for r in fed.records("steps") if isinstance(r, Step))


def test_the_process_of_a_frozen_policy_publishes_version_0_and_stops(
    bench: Bench, model: Path, tmp_path: Path
) -> None:
    config = make_config(model, tmp_path, "frozen")
    still = config.policies["main"].model_copy(update={"frozen": True, "depth": 2.0})
    other = config.policies["main"]
    grpo = config.trainer.model_copy(update={"loss": "reinforce"})  # refused for a policy that trains on old data
    config = config.model_copy(update={"policies": {"main": still, "other": other}, "trainer": grpo})
    fed = feed(config, bench.broker, 0)
    assert "frozen: version 0 is published" in bench.train(config)
    (stop,) = fed.records("steps")
    assert isinstance(stop, Stop) and (stop.reason, stop.policy) == ("frozen", 0)
    assert Chain(open_store(config.run_folder() / "store"), config.run.id, "main").versions() == [0]
    folder = config.run_folder()
    assert not list((folder / "checkpoints").rglob("*.pt")) and not (folder / "model").exists()
    assert "nothing to do" in bench.train(config), "a second start finds the Stop"
