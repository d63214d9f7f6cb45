"""Loading a model finds out how it can be run; what cannot be is refused with the setting to change."""

from pathlib import Path

import pytest
import torch
from tiny_models import make_family

from headrace.schemas.config import LoraConfig, TrainerConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.backends import load_model
from headrace.trainers.backends.load_model import load_policy_model
from headrace.trainers.backends.policy_model import PolicyModel


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        load_policy_model(tmp_path)


def test_a_model_that_changes_its_logits_unseen_runs_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head whose output is changed by the model after it: only the whole model knows."""
    from transformers import Qwen3ForCausalLM

    real = Qwen3ForCausalLM.forward

    def bent(self: object, *arguments: object, **more: object) -> object:
        out = real(self, *arguments, **more)
        out.logits = out.logits.square()
        return out

    folder = make_family(tmp_path / "m", "Qwen3")
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", bent)
    policy = load_policy_model(folder)
    assert (policy.packed, policy.lean) == (False, False)
    told = capsys.readouterr().err
    assert "Qwen3ForCausalLM" in told
    assert "logits in slices" in told


def test_attention_that_sees_other_sequences_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that loses the packing on its way to attention runs padded."""
    folder = make_family(tmp_path / "m", "Qwen3")

    def lost(self: PolicyModel, tokens: torch.Tensor, positions: torch.Tensor, packing: object) -> torch.Tensor:
        self.model.set_attn_implementation("sdpa")
        own = torch.arange(tokens.shape[1])[None]
        hidden: torch.Tensor = self._inner(input_ids=tokens, position_ids=own, use_cache=False).last_hidden_state
        return hidden

    monkeypatch.setattr(PolicyModel, "_run", lost)
    policy = load_policy_model(folder)
    assert (policy.packed, policy.lean) == (False, True)


def test_chunked_attention_is_not_packed(tmp_path: Path) -> None:
    """Its border lies beyond the few tokens of the trial."""
    policy = load_policy_model(make_family(tmp_path / "m", "Qwen3"))
    assert load_model._attends_by_name(policy.model)
    policy.model.config.attention_chunk_size = 8192
    assert not load_model._attends_by_name(policy.model)


def test_adapters_of_unknown_modules_are_refused(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "m", "Qwen3")
    with pytest.raises(ConfigurationError, match=r"trainer\.lora\.targets"):
        load_policy_model(folder, TrainerConfig(lora=LoraConfig(rank=2, targets=["w_pack"])))


def test_activations_of_a_model_without_layers_to_checkpoint_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    folder = make_family(tmp_path / "m", "Qwen3")
    monkeypatch.setattr(Qwen3ForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigurationError, match="cannot checkpoint activations"):
        load_policy_model(folder, TrainerConfig(activation_checkpointing=True))
