"""Tokens that the model does not have are named before it runs into them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_feed import make_items

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.batching import bare_rows
from headrace.trainers.vocabulary import Vocabulary

ITEMS = make_items(1, groups=2, size=2, version=0, seed=0)


def known(folder: Path, config: Any) -> Vocabulary:
    (folder / "config.json").write_text(json.dumps(config))
    return Vocabulary.of(str(folder))


@pytest.mark.parametrize("token", [20, 151_999, -1])
@pytest.mark.parametrize("at", [0, -1], ids=["prompt", "answer"])
def test_a_sequence_with_a_token_of_another_model_is_left_out_by_name(
    tmp_path: Path, token: int, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = known(tmp_path, {"vocab_size": 20})
    assert len(vocabulary.known(bare_rows(ITEMS), ITEMS)) == len(ITEMS) and not capsys.readouterr().err
    tokens = ITEMS[1].sequences[0].tokens.copy()
    tokens[at] = token
    items = [ITEMS[0], replace(ITEMS[1], lane=3, sequences=[replace(ITEMS[1].sequences[0], tokens=tokens)]), *ITEMS[2:]]
    assert [row.item for row in vocabulary.known(bare_rows(items), items)] == [0, 2, 3]
    said = capsys.readouterr().err
    assert "1 of 4 sequences of batch 1 hold tokens" in said and "they are left out" in said
    assert f"token {token} (of 20) at position {at % len(tokens)} of group 1000, replica 1, in lane 3" in said


def test_where_every_sequence_is_of_another_model_it_is_the_model_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"4 of 4 sequences.* policies.P.model is not what the workers sample"):
        known(tmp_path, {"vocab_size": 1}).known(bare_rows(ITEMS), ITEMS)


def test_the_size_is_that_of_the_text_part_or_not_known(tmp_path: Path) -> None:
    assert known(tmp_path, {"text_config": {"vocab_size": 7}}).size == 7
    for config in ({}, [], {"text_config": {}}, {"vocab_size": "many"}):
        unknown = known(tmp_path, config)
        assert unknown.size == 0
        assert len(unknown.known(bare_rows(ITEMS), ITEMS)) == len(ITEMS)
    assert Vocabulary.of(str(tmp_path / "nowhere")).size == 0


def test_empty_sequences_hold_no_wrong_token(tmp_path: Path) -> None:
    empty = replace(ITEMS[0].sequences[0], tokens=np.zeros(0, np.int32), mask=np.zeros(0, np.uint8))
    items = [replace(ITEMS[0], sequences=[empty])]
    assert len(known(tmp_path, {"vocab_size": 1}).known(bare_rows(items), items)) == 1
