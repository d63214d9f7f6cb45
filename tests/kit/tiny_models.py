"""Models of a few thousand random weights, of many architectures, as Hugging Face folders."""

from pathlib import Path
from typing import Any

WORDS = 50
_COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"tie_word_embeddings": True},
    "Llama": {"tie_word_embeddings": False},
    "Mistral": {"sliding_window": 4},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "Gemma2": {"sliding_window": 4, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
    "Gemma3": {"final_logit_softcapping": 5.0},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GPTNeoX": {"attention_bias": True},
    "GptOss": {"num_local_experts": 4, "sliding_window": 4},
    "Bloom": {"n_head": 4, "n_layer": 2},
}
"""Family to what its configuration has beside the common settings."""


def make_family(folder: Path, family: str, **more: Any) -> Path:
    """A model of the family whose weights are large enough for attention to matter."""
    import torch
    import transformers

    name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, name)(**{**_COMMON, **FAMILIES[family], **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder
