"""Make train.jsonl (512 problems) and eval.jsonl (128 held-out ones); both are committed and the same on any machine.

A problem asks for the largest of four digits: `3707=` is answered by `7`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_data

HERE = Path(__file__).resolve().parent


def row(number: int) -> dict[str, str]:
    """The problem of a number below 10,000."""
    digits = f"{number:04d}"
    return {"prompt": f"{digits}=", "answer": max(digits)}


if __name__ == "__main__":
    tiny_data.write(HERE, 10_000, row)
