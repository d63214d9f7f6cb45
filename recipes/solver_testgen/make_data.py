"""Make train.jsonl (512 problems) and eval.jsonl (128 held-out ones); both are committed and the same on any machine.

A problem shows a linear function at three places, `0:5;1:8;2:11=`, and asks for its program, `3*x+5`. A row has hidden
tests at other places as its answer, and the program as its reference.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_data

HERE = Path(__file__).resolve().parent
HIDDEN = (0, 1, 4, 7)


def question(k: int, c: int) -> str:
    """The function at 0, 1 and 2."""
    return ";".join(f"{x}:{k * x + c}" for x in range(3)) + "="


def program(k: int, c: int) -> str:
    """The program that is asked for."""
    return f"{k}*x+{c}"


def row(number: int) -> dict[str, str]:
    """The problem of a number below 900: factors to 8, terms to 99."""
    k, c = divmod(number, 100)
    tests = {"inputs": [[x] for x in HIDDEN], "outputs": [k * x + c for x in HIDDEN]}
    return {"prompt": question(k, c), "answer": json.dumps(tests), "solution": program(k, c)}


if __name__ == "__main__":
    tiny_data.write(HERE, 900, row)
