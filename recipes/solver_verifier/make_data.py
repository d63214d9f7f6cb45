"""Make train.jsonl (512 problems) and eval.jsonl (128 held-out ones); both are committed and the same on any machine.

A problem adds two numbers of two digits without carrying: `37+45=` is answered by `72`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_data

HERE = Path(__file__).resolve().parent


def answer(a: int, b: int) -> str:
    """The sum of each pair of digits, without what would be carried."""
    return "".join(str((int(x) + int(y)) % 10) for x, y in zip(f"{a:02d}", f"{b:02d}", strict=True))


def row(number: int) -> dict[str, str]:
    """The problem of a number below 10,000."""
    a, b = divmod(number, 100)
    return {"prompt": f"{a:02d}+{b:02d}=", "answer": answer(a, b)}


if __name__ == "__main__":
    tiny_data.write(HERE, 10_000, row)
