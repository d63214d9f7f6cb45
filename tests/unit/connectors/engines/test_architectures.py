"""The transformers engine decodes other architectures as their own forward does, and refuses what it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.connectors.engines.engine import Request, generate
from headrace.connectors.engines.transformers import TransformersEngine
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Sampling

SMALL: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        ("Qwen2", {"num_key_value_heads": 2}),
        ("GPT2", {}),
    ],
)
def test_log_probs_equal_the_models_own(tmp_path: Path, name: str, over: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **over)
    kind = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = kind(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    engine = TransformersEngine(tmp_path, slots=4)
    bits = {n: p.detach().view(torch.int16).numpy().view(np.uint16).copy() for n, p in model.named_parameters()}
    engine.load_weights(bits, 0)
    draw = np.random.default_rng(0)
    requests = [
        Request(i, draw.integers(3, 60, 3 + i % 5).astype(np.int32), Sampling(max_new_tokens=10, seed=i))
        for i in range(12)
    ]
    model = model.float()
    for request, done in zip(requests, generate(engine, requests), strict=True):
        ids = torch.from_numpy(np.concatenate([request.prompt, done.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logp = model(ids).logits[0, request.prompt.size - 1 : -1].log_softmax(-1)
        full = logp[torch.arange(done.tokens.size), ids[0, request.prompt.size :]].numpy()
        np.testing.assert_allclose(done.logprobs, full, atol=1e-4)


def test_sliding_attention_is_refused_by_name(tmp_path: Path) -> None:
    transformers.Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"sliding_attention.*take rollout\.engine=vllm"):
        TransformersEngine(tmp_path)


def test_unknown_options_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"rollout\.options.*transformers"):
        TransformersEngine(tiny_model, options={"divice": "cuda"})
