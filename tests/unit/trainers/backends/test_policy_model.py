"""Log-probs of packed rows are those of the whole model on each row alone."""

from pathlib import Path

import pytest
import torch
from trainer_feed import make_model

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.policy_model import PolicyModel, load_policy_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return load_policy_model(make_model(tmp_path_factory.mktemp("model") / "m"))


@pytest.mark.parametrize("split", [True, False], ids=["projection of trained tokens", "whole logits"])
def test_rows_are_independent_of_their_padding(model: PolicyModel, split: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 20, (3, 9), generator=generator)
    lengths, temperature = [9, 5, 2], torch.tensor([1.0, 0.5, 2.0])
    mask = torch.zeros(3, 9, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, 1:length:2] = True
        tokens[row, length:] = 0
    assert model.split
    model.split = split
    found = model(tokens, mask, temperature)
    model.split = True
    for row, length in enumerate(lengths):
        logits = model.model(input_ids=tokens[row : row + 1, :length]).logits[0] / temperature[row]
        alone = logits.log_softmax(-1)
        for at in range(1, length):
            wanted = alone[at - 1, tokens[row, at]].item() if mask[row, at] else 0.0
            assert found[row, at].item() == pytest.approx(wanted, abs=1e-5)
    assert not found[~mask].any()


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        load_policy_model(tmp_path)
