"""Training from the log: a recorded run is trained again to the bit, in parts, with another loss, and after a kill."""

import hashlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from trainer_feed import Feed, local_broker, make_config, make_model, trainer_arguments

from headrace.connectors.kafka import Connection
from headrace.connectors.model_folder import tokenizer_digest
from headrace.schemas.codec import encode
from headrace.schemas.config import PolicyConfig, RunConfig, dump_config
from headrace.schemas.errors import EXIT_CONFIGURATION
from headrace.schemas.records import RunManifest

BATCHES = 8


class Archive:
    """A run of eight batches on plain torch, recorded, and what it takes to train from it."""

    def __init__(self, nursery: Nursery, broker: str, folder: Path) -> None:
        self._nursery, self.broker = nursery, broker
        model = make_model(folder / "model")
        self.config = make_config(model, folder, "recorded", keep_checkpoints=1, keep_checkpoint_every=3)
        self.fed = Feed(Connection.of(self.config.kafka, "recorded", broker), self.config)
        for number in range(1, BATCHES + 1):
            self.fed.batch(number)
        self.fed.end()
        manifest = RunManifest(
            run="recorded", created_ms=1, tokenizer_digest=tokenizer_digest(model), policies=["main"]
        )
        self.fed.connection.produce(self.fed.producer_of_run(), "run", encode(manifest), key=b"manifest")
        self.fed.producer_of_run().flush(10)
        trainer = nursery.start(*trainer_arguments(self.config, broker))
        assert trainer.wait(120) == 0, trainer.log()

    @property
    def folder(self) -> Path:
        return self.config.run_folder()

    def again(self, name: str, **trainer: Any) -> RunConfig:
        """The recorded configuration under another id, with other settings of the trainer."""
        return self.config.model_copy(
            update={
                "run": self.config.run.model_copy(update={"id": name}),
                "trainer": self.config.trainer.model_copy(update=trainer),
            }
        )

    def train(self, config: RunConfig, *more: str, trap: tuple[str, int] | None = None, code: int = 0) -> str:
        """Train from the log; what it said."""
        config.run_folder().mkdir(exist_ok=True)
        file = config.run_folder() / "config.json"
        dump_config(config, file)
        words = ["--config", str(file), "--recorded", str(self.folder), "--policy", "main"]
        words += ["--bootstrap", self.broker, *more]
        trainer = self._nursery.start(*words, trap=trap, program="from_log")
        assert trainer.wait(120) == code, trainer.log()
        return trainer.log()

    def state(self) -> dict[str, str]:
        """Everything that the recorded run has left: files by digest, and the ends of its topics."""
        files = {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }
        ends = {topic: str(self.fed.connection.end_offsets(topic)) for topic in self.fed.connection.list_run_topics()}
        return {**files, **ends}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    with local_broker(tmp_path_factory.mktemp("broker")) as address:
        nursery = Nursery(tmp_path_factory.mktemp("logs"))
        yield Archive(nursery, address, tmp_path_factory.mktemp("runs"))
        nursery.close()


def lines_of(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_folder() / "metrics.jsonl").read_text().splitlines()]


def weights_of(config: RunConfig) -> bytes:
    return (config.run_folder() / "model" / "main" / "model.safetensors").read_bytes()


def test_the_whole_run_again_is_bit_equal_and_the_recorded_one_untouched(archive: Archive) -> None:
    before, config = archive.state(), archive.again("whole")
    said = archive.train(config)
    assert weights_of(config) == weights_of(archive.config)
    assert [(line["batch"], line["equal"]) for line in lines_of(config)] == [(k, True) for k in range(1, BATCHES + 1)]
    assert "begins with the initial weights" in said and "the weights of each are the recorded ones" in said
    assert archive.state() == before
    metrics = lines_of(config)[0]["metrics"]
    assert metrics["reward/mean"] > 0 and metrics["optim/grad_norm"] > 0


def test_a_range_begins_with_the_checkpoint_before_it(archive: Archive) -> None:
    config = archive.again("range")
    said = archive.train(config, "--first", "5", "--last", "7")
    assert "begins with the run's checkpoint of batch 3" in said
    assert [(line["batch"], line["equal"]) for line in lines_of(config)] == [(k, True) for k in (4, 5, 6, 7)]


def test_another_loss_begins_where_it_was_asked_to_and_says_where_weights_part(archive: Archive) -> None:
    config = archive.again("ablation", advantage="dr")
    said = archive.train(config, "--first", "5")
    equal = [(line["batch"], line["equal"]) for line in lines_of(config)]
    assert equal == [(4, True), (5, False), (6, False), (7, False), (8, False)]
    assert "differ from the recorded ones from batch 5 on" in said


def test_killed_it_goes_on_and_ends_with_the_same_weights(archive: Archive) -> None:
    config = archive.again("killed", lr=3e-3)
    undisturbed = archive.again("undisturbed", lr=3e-3)
    archive.train(undisturbed)
    archive.train(config, trap=("in-checkpoint", 3), code=-signal.SIGKILL)
    archive.train(config, trap=("before-checkpoint", 6), code=-signal.SIGKILL)
    said = archive.train(config)
    assert "goes on after batch 3" in said
    assert weights_of(config) == weights_of(undisturbed) != weights_of(archive.config)
    assert [line["batch"] for line in lines_of(config)] == list(range(1, BATCHES + 1))
    assert "done at batch 8" in archive.train(config), "what is done stays done"
    back = archive.train(config, "--back-to", "4")
    assert "goes on after batch 3" in back or "begins with" in back
    assert weights_of(config) == weights_of(undisturbed)


def test_deepspeed_trains_from_a_run_of_plain_torch(archive: Archive) -> None:
    """From the run's checkpoint, written by the other backend; not bit-equal, and near."""
    config = archive.again("deepspeed", backend="deepspeed", zero_stage=2)
    archive.train(config, "--first", "7")
    lines = lines_of(config)
    assert [line["batch"] for line in lines] == [7, 8]
    plain = {line["batch"]: line for line in lines_of(archive.again("whole"))}
    for line in lines:
        assert line["loss"] == pytest.approx(plain[line["batch"]]["loss"], rel=0.05, abs=2e-3)


def test_what_was_not_trained_cannot_be_trained_again(archive: Archive) -> None:
    said = archive.train(archive.again("beyond"), "--last", "9", code=EXIT_CONFIGURATION)
    assert "it has trained batches 1 to 8" in said
    said = archive.train(archive.again("nobody"), "--first", "9", code=EXIT_CONFIGURATION)
    assert "batches 9 to 8" in said


def test_a_model_that_reads_other_text_in_the_same_tokens_is_refused(archive: Archive, tmp_path: Path) -> None:
    model = shutil.copytree(archive.config.policies["main"].model, tmp_path / "other")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"0": 5, "1": 4}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = archive.again("other-words")
    config = config.model_copy(update={"policies": {"main": PolicyConfig(model=str(model))}})
    assert "token ids would mean other text" in archive.train(config, code=EXIT_CONFIGURATION)
