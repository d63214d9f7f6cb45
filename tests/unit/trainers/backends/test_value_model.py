"""A model with a value head: what it gives, what it looks at, and what is trained."""

from pathlib import Path

import pytest
import torch
from trainer_feed import make_model

from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends.value_model import ValueModel, load_value_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ValueModel:
    return load_value_model(make_model(tmp_path_factory.mktemp("model") / "m"))


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, mask, temperature, lengths of rows of 9, 5 and 2 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens, lengths = torch.randint(4, 20, (3, 9), generator=generator), torch.tensor([9, 5, 2])
    mask = torch.zeros(3, 9, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        mask[row, 1:length:2] = True
        tokens[row, length:] = 0
    return tokens, mask, torch.ones(3), lengths


def test_a_fresh_critic_gives_zero_and_learns_from_the_first_step(model: ValueModel) -> None:
    values, zeros = model(*given())
    assert not values.any() and not zeros.any()
    (values - 1).pow(2).sum().backward()
    assert model.head.weight.grad is not None and model.head.weight.grad.abs().sum() > 0
    model.zero_grad()


def test_values_are_of_the_state_before_a_token_and_know_nothing_of_what_follows(model: ValueModel) -> None:
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    tokens, mask, temperature, lengths = given()
    values, _ = model(tokens, mask, temperature, lengths)
    assert not values[~mask].any()
    for row, length in enumerate(lengths.tolist()):
        for at in range(1, length, 2):
            alone = model.model(input_ids=tokens[row : row + 1, :at]).last_hidden_state[0, -1]
            assert values[row, at].item() == pytest.approx(model.head(alone).item(), abs=1e-5)
    changed = torch.where(torch.arange(9) >= 3, (tokens + 1) % 20, tokens)
    again, _ = model(changed, mask, temperature, lengths)
    assert torch.allclose(again[:, :4], values[:, :4], atol=1e-6)


def test_body_and_head_are_trained_under_their_own_names(model: ValueModel) -> None:
    names = [name for name, _ in model.published()]
    assert names[-2:] == ["head.weight", "head.bias"] and "model.embed_tokens.weight" in names
    assert len(names) == len(set(names)) and not any("lm_head" in name for name in names)
    assert not model.train().training


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        load_value_model(tmp_path)
