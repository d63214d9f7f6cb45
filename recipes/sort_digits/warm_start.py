"""Make the model that the run starts from: a tiny random Qwen3 with a character tokenizer, then a short noisy SFT.

A share of the demonstrations, growing with the length, is wrong on purpose (reversed, copied or cut off). The result
sorts sometimes: enough for a reward to tell good from bad, with much left to learn. Offline and repeatable by the seed.

    python recipes/sort_digits/warm_start.py --out FOLDER [--seed 0] [--steps 400]
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789=+-*/()<>.,:;?! \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
LENGTHS = (2, 3, 4, 5, 6)
BATCH = 64
LEARNING_RATE = 1e-3
WARMUP = 40


def make_tokenizer(characters: str = CHARACTERS) -> transformers.PreTrainedTokenizerFast:
    """One token per character; ``<eos>`` ends an answer."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> Any:
    """A random Qwen3 with 0.11 million parameters in float32."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=192,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def demonstration(rng: random.Random, noise: float) -> tuple[str, str]:
    """A prompt and an answer; of six digits a share ``noise`` of the answers is wrong, of two digits a third of it."""
    digits = "".join(rng.choices("0123456789", k=rng.choice(LENGTHS)))
    answer = "".join(sorted(digits))
    if rng.random() < noise * len(digits) / LENGTHS[-1]:
        answer = rng.choice((answer[::-1], digits, answer[:-1]))
    return f"{digits}=", answer


def batch_of(pairs: list[tuple[str, str]], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``[pairs, length]`` padded at the right, and labels that are -100 outside the answers."""
    rows = []
    for prompt, answer in pairs:
        asked = tokenizer(prompt, add_special_tokens=False).input_ids
        said = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        rows.append((asked + said, [-100] * len(asked) + said))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([r + [tokenizer.pad_token_id] * (length - len(r)) for r, _ in rows])
    labels = torch.tensor([r + [-100] * (length - len(r)) for _, r in rows])
    return ids, labels


def fine_tune(model: Any, tokenizer: Any, steps: int, noise: float, held_out: set[str], seed: int) -> float:
    """SFT in place for ``steps`` batches of 64; returns the last loss. Held-out prompts are never shown."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    last = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * (1 - 0.9 * step / steps)
        pairs = [pair for pair in (demonstration(rng, noise) for _ in range(BATCH)) if pair[0] not in held_out]
        ids, labels = batch_of(pairs, tokenizer)
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
    return last


def main() -> None:
    """Write the warm model with its tokenizer to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--noise", type=float, default=0.7)
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    lines = Path(__file__).with_name("eval.jsonl").read_text("utf-8").splitlines()
    held_out = {json.loads(line)["prompt"] for line in lines}
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    loss = fine_tune(model, tokenizer, arguments.steps, arguments.noise, held_out, arguments.seed)
    # The folder appears in one piece, so that an interrupted warm start is made again and not taken for a model.
    unfinished = arguments.out.with_name(arguments.out.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(arguments.out)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"warm start: {parameters} parameters, SFT loss {loss:.3f}, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
