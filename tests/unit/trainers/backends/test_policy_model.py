"""Log-probs and gradients of packed rows are those of the whole model on each row alone, in many architectures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, WORDS, make_family
from torch import Tensor

from headrace.schemas.config import TrainerConfig
from headrace.trainers.backends.load_model import load_policy_model
from headrace.trainers.backends.policy_model import PolicyModel

LENGTHS = [9, 5, 2, 23, 8]
PADDED = {"Bloom"}
"""Families whose attention packed rows do not have."""


@pytest.fixture(scope="module")
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp(request.param), request.param)


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, WORDS, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        mask[row, 1:length:2] = True
        tokens[row, length:] = 0
    heat = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7])
    return {"tokens": tokens, "mask": mask, "temperature": heat, "lengths": torch.tensor(LENGTHS)}


def alone(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The whole model on one row after another, without padding."""
    logprobs, entropies = [], []
    for row, length in enumerate(LENGTHS):
        tokens = given["tokens"][row : row + 1, :length]
        every = (model(input_ids=tokens).logits[0] / given["temperature"][row]).log_softmax(-1)
        chosen = every[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        pad = (1, max(LENGTHS) - length)
        logprobs.append(torch.nn.functional.pad(chosen, pad))
        entropies.append(torch.nn.functional.pad(-(every.exp() * every).sum(-1)[:-1], pad))
    return tuple(torch.where(given["mask"], torch.stack(x), 0.0) for x in (logprobs, entropies))  # type: ignore[return-value]


def gradients(model: Any, found: tuple[Tensor, Tensor]) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    factors = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(1))
    parts = torch.autograd.grad((found[0] * factors).sum() + found[1].sum(), parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(parameters, parts, strict=True)]
    )


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_packed_rows_equal_each_row_alone(folder: Path) -> None:
    given = rows()
    policy = load_policy_model(folder)
    family = folder.name[:-1]
    assert policy.lean
    assert policy.packed == (family not in PADDED)
    found = policy(**given)
    mine = gradients(policy, found)
    plain = PolicyModel(policy.model, packed=False, lean=False)
    plain.model.set_attn_implementation("eager")
    wanted = alone(plain.model, given)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    other = gradients(plain, wanted)
    assert torch.linalg.vector_norm(mine - other) < 1e-4 * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("folder", ["Qwen3"], indirect=True)
@pytest.mark.parametrize(("packed", "lean"), [(True, True), (False, True), (False, False)])
def test_every_way_to_run_gives_the_same(folder: Path, packed: bool, lean: bool) -> None:
    given = rows()
    policy = load_policy_model(folder, TrainerConfig(packing=packed, backend="torch"))
    assert policy.packed == packed
    policy.lean = lean
    wanted = alone(policy.model, given) if not packed else load_policy_model(folder)(**given)
    for a, b in zip(policy(**given), wanted, strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    assert not policy(**given)[0][~given["mask"]].any()


@pytest.mark.parametrize("folder", ["Qwen3", "Llama", "Qwen3Moe"], indirect=True)
def test_checkpointed_activations_change_nothing_but_memory(folder: Path) -> None:
    given = rows()
    whole = load_policy_model(folder)
    wanted = gradients(whole, whole(**given))
    held: list[int] = []
    for on in (False, True):
        config = TrainerConfig(backend="torch", activation_checkpointing=on)
        policy = load_policy_model(folder, config)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: (s.append(x.numel()), x)[1], lambda x: x):
            found = policy(**given)
        held.append(sum(sizes))
        mine = gradients(policy, found)
        assert torch.linalg.vector_norm(mine - wanted) < 1e-5 * torch.linalg.vector_norm(wanted)
        assert not any(m.training for m in policy.modules() if isinstance(m, torch.nn.Dropout))
    assert held[1] < 0.5 * held[0]


@pytest.mark.parametrize("folder", ["Qwen3"], indirect=True)
def test_a_micro_batch_that_trains_nothing_reaches_every_weight(folder: Path) -> None:
    given = rows()
    policy = load_policy_model(folder)
    given["mask"] = torch.zeros_like(given["mask"])
    logprobs, _ = policy(**given)
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())
