"""A model with another tokenizer than the run's is refused."""

from pathlib import Path
from typing import Any, cast

import pytest

from headrace.connectors.kafka import Connection
from headrace.connectors.model_folder import tokenizer_digest
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import End, Record, RunManifest
from headrace.trainers.same_tokenizer import check_tokenizer


class Recorded:
    """A connection to a run whose topic ``run`` holds these records; None is a stranger's."""

    run = "recorded"

    def __init__(self, *records: Record | None) -> None:
        self._records = records

    def read_topic(self, topic: str) -> list[Any]:
        assert topic == "run"
        return [type("Raw", (), {"decoded_if_ours": lambda self, r=record: r})() for record in self._records]


def manifest(digest: str) -> RunManifest:
    return RunManifest(run="recorded", created_ms=1, tokenizer_digest=digest, policies=["main"])


def check(folder: Path, *records: Record | None) -> None:
    check_tokenizer(cast(Connection, Recorded(*records)), str(folder))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    return tmp_path


def test_the_runs_own_tokenizer_and_a_run_that_names_none_pass(model: Path) -> None:
    check(model, None, manifest("0" * 64), manifest(tokenizer_digest(model)))
    check(model, manifest(""), End(reason="x", policy=0))
    check(model)


def test_another_tokenizer_is_refused_with_both_digests(model: Path) -> None:
    wanted = tokenizer_digest(model)
    (model / "tokenizer.json").write_text('{"model": 2}')
    with pytest.raises(ConfigurationError, match=rf"{model}.* run recorded .*{wanted[:12]} wanted"):
        check(model, manifest(wanted))
