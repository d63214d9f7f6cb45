"""Make train.jsonl (512 problems) and eval.jsonl (128 held-out ones); both are committed and the same on any machine.

A problem takes three digits from three others without borrowing: `352-174=` is answered by `288`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_data

HERE = Path(__file__).resolve().parent


def answer(a: int, b: int) -> str:
    """The difference of each pair of digits, as if one could be borrowed from nowhere."""
    return "".join(str((int(x) - int(y)) % 10) for x, y in zip(f"{a:03d}", f"{b:03d}", strict=True))


def row(number: int) -> dict[str, str]:
    """The problem of a number below a million."""
    a, b = divmod(number, 1000)
    return {"prompt": f"{a:03d}-{b:03d}=", "answer": answer(a, b)}


if __name__ == "__main__":
    tiny_data.write(HERE, 1_000_000, row)
