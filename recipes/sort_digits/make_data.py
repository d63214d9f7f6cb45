"""Make train.jsonl (512 prompts) and eval.jsonl (256 held-out prompts); both are committed and the same on any machine.

The pool is mixed on purpose. Two digits are soon always right and nine or ten are almost never right, so groups of them
teach nothing and dynamic sampling has something to drop; four to six digits are what the evaluation asks.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
TRAIN_MIX = ((64, (2,)), (384, (4, 5, 6)), (64, (9, 10)))
"""Training prompts: how many, of which lengths."""
EVAL_COUNT, EVAL_LENGTHS = 256, (4, 5, 6)


def draw(rng: random.Random, lengths: tuple[int, ...]) -> str:
    """Digits of a random length out of ``lengths``."""
    return "".join(rng.choices("0123456789", k=rng.choice(lengths)))


def row(digits: str) -> dict[str, str]:
    """One line of a dataset: the digits to sort, and the digits sorted."""
    return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


def main() -> None:
    """Write both files beside this one."""
    rng = random.Random(20240229)
    seen: set[str] = set()

    def take(count: int, lengths: tuple[int, ...]) -> list[str]:
        taken: list[str] = []
        while len(taken) < count:
            digits = draw(rng, lengths)
            if digits not in seen:
                seen.add(digits)
                taken.append(digits)
        return taken

    train = [digits for count, lengths in TRAIN_MIX for digits in take(count, lengths)]
    rng.shuffle(train)
    for name, pool in (("train", train), ("eval", take(EVAL_COUNT, EVAL_LENGTHS))):
        lines = "".join(json.dumps(row(digits)) + "\n" for digits in pool)
        (HERE / f"{name}.jsonl").write_text(lines, "utf-8")


if __name__ == "__main__":
    main()
