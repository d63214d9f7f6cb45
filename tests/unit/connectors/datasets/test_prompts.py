"""Datasets: every fault of a row is found at load, by file, line and field; positions give the same prompts always."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.connectors.datasets.prompts import PromptDataset
from headrace.schemas.config import StreamConfig
from headrace.schemas.errors import ConfigurationError

GOOD = [{"prompt": f"{i}=", "answer": str(i), "level": i % 3} for i in range(10)]


def _file(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def _dataset(path: Path, limit: int = 0, seed: int = 0, **over: Any) -> PromptDataset:
    config = StreamConfig.model_validate({"dataset": str(path), **over})
    return PromptDataset("main", config, rewards=["exact_match", "judge"], seed=seed, limit=limit)


def test_prompts_of_an_epoch_are_the_rows_in_a_seeded_order(tmp_path: Path) -> None:
    path = _file(tmp_path, GOOD)
    first = [_dataset(path).prompt(i) for i in range(30)]
    again = [_dataset(path).prompt(i) for i in range(30)]
    assert first == again
    for epoch in range(3):
        assert sorted(p.row for p in first[10 * epoch : 10 * epoch + 10]) == list(range(10))
        assert {p.epoch for p in first[10 * epoch : 10 * epoch + 10]} == {epoch}
    orders = {tuple(p.row for p in first[10 * e : 10 * e + 10]) for e in range(3)}
    assert len(orders) == 3
    assert [p.row for p in first] != [_dataset(path, seed=1).prompt(i).row for i in range(30)]
    one = first[0]
    assert (one.prompt, one.answer, one.columns) == (f"{one.row}=", str(one.row), {"level": str(one.row % 3)})
    assert (one.reward, one.dataset, one.position) == ("exact_match", "rows.jsonl", 0)
    assert len(one.prompt_id) == 16


def test_without_shuffle_rows_stand_in_their_order_and_a_limit_cuts(tmp_path: Path) -> None:
    path = _file(tmp_path, GOOD)
    plain = _dataset(path, shuffle=False, limit=4)
    assert [plain.prompt(i).row for i in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("row", "over", "says"),
    [
        ({"question": "1=", "answer": "1"}, {}, r"column 'prompt' is missing.*'question', 'answer'.*prompt_column"),
        ({"prompts": "1=", "answer": "1"}, {}, r"line 3: column 'prompt' is missing; did it become 'prompts'"),
        ({"prompt": "1="}, {}, r"line 3: column 'answer' is missing"),
        ({"prompt": " ", "answer": "1"}, {}, r"line 3: column 'prompt': the prompt is empty"),
        ({"prompt": 7, "answer": "1"}, {}, r"line 3: column 'prompt': a prompt is text or a list of messages, not 7"),
        ({"prompt": "1=", "answer": None}, {}, r"line 3: column 'answer': the value is null"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, {}, r"message 0 needs the texts 'role' and 'content'"),
        ("{not json", {}, r"line 3: not JSON"),
        ('["a list"]', {}, r"line 3: a JSON list instead of an object"),
        ('{"prompt": "a\\ud800b", "answer": "1"}', {}, r"line 3: column 'prompt': '\\ud800' at character 1 is a lone"),
        ({"prompt": "1=", "answer": "1"}, {"id_column": "id"}, r"line 3: column 'id' is missing"),
        ({"prompt": "1=", "answer": "1"}, {"reward_column": "r"}, r"line 3: column 'r' is missing"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path: Path, row: Any, over: dict[str, str], says: str) -> None:
    extra = {"id_column": {"id": "x"}, "reward_column": {"r": "judge"}}
    more = {k: v for name in over for k, v in extra[name].items()}
    rows = [{**GOOD[i], **{k: f"{v}{i}" if k == "id" else v for k, v in more.items()}} for i in (0, 1)]
    path = _file(tmp_path, [*rows, row])
    with pytest.raises(ConfigurationError, match=says) as caught:
        _dataset(path, **over)
    assert str(path) in str(caught.value)
    left = _dataset(path, on_bad_row="dead-letter", **over)
    assert len(left) == 2
    assert [bad.where for bad in left.bad] == [f"{path} line 3"]
    assert left.bad[0].raw


def test_duplicate_ids_and_unknown_rewards(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b", "id": name, "kind": "judge"} for name in ("x", "y", "x")]
    path = _file(tmp_path, rows)
    with pytest.raises(ConfigurationError, match=r"line 3: column 'id': id 'x' stands at .*line 1 too"):
        _dataset(path, id_column="id")
    with pytest.raises(ConfigurationError, match=r"streams.main.reward: there is no reward 'exactmatch'; did you mean"):
        _dataset(path, reward="exactmatch")
    assert _dataset(path, reward_column="kind").prompt(0).reward == "judge"
    with pytest.raises(ConfigurationError, match=r"line 1: column 'id': there is no reward 'x'"):
        _dataset(path, reward_column="id")


def test_chat_messages_become_messages(tmp_path: Path) -> None:
    path = _file(tmp_path, [{"prompt": [{"role": "user", "content": "naïve ☃"}], "answer": [1, 2], "task_type": "t"}])
    prompt = _dataset(path).prompt(0)
    assert prompt.prompt == ""
    assert [(m.role, m.content) for m in prompt.messages] == [("user", "naïve ☃")]
    assert (prompt.answer, prompt.task_type) == ("[1, 2]", "t")


def test_the_digest_tells_another_dataset_order_or_column(tmp_path: Path) -> None:
    path = _file(tmp_path, GOOD)
    other = _file(tmp_path, [*GOOD[:9], {**GOOD[9], "answer": "10"}], "other.jsonl")
    digests = [
        _dataset(path).digest, _dataset(other).digest, _dataset(path, seed=1).digest,
        _dataset(path, answer_column="level").digest, _dataset(path, shuffle=False).digest,
    ]  # fmt: skip
    assert len(set(digests)) == 5
    assert _dataset(path).digest == digests[0]
    assert _dataset(path, shuffle=False, seed=1).digest == digests[4]


def test_a_file_that_is_not_there_or_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        _dataset(tmp_path / "none.jsonl")
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(ConfigurationError, match=r"set streams\.S\.format"):
        _dataset(tmp_path / "rows.txt")
    with pytest.raises(ConfigurationError, match="no row that can be used"):
        _dataset(_file(tmp_path, []))


def test_parquet_gives_the_same_prompts_and_names_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(GOOD), path)
    from_json = _dataset(_file(tmp_path, GOOD))
    from_parquet = _dataset(path)
    assert [from_parquet.prompt(i).prompt for i in range(20)] == [from_json.prompt(i).prompt for i in range(20)]
    assert from_parquet.prompt(3).prompt_id == from_json.prompt(3).prompt_id
    parquet.write_table(pyarrow.Table.from_pylist([{"question": "1", "answer": "1"}]), path)
    with pytest.raises(ConfigurationError, match=r"row 0: column 'prompt' is missing"):
        _dataset(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(ConfigurationError, match="as Parquet"):
        _dataset(path)


def test_a_hugging_face_folder_gives_the_same_prompts(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(GOOD).save_to_disk(str(tmp_path / "hf"))
    found = _dataset(tmp_path / "hf", shuffle=False)
    assert [found.prompt(i).prompt for i in range(10)] == [row["prompt"] for row in GOOD]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(GOOD)}).save_to_disk(str(tmp_path / "split"))
    with pytest.raises(ConfigurationError, match=r"several splits; name one of .*train"):
        _dataset(tmp_path / "split")
    assert len(_dataset(tmp_path / "split" / "train")) == 10
