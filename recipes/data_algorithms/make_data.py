"""Make train.jsonl: 240 prompts of sort_digits in a mix of its own; committed, and the same on any machine.

Most prompts of a real set teach a good model nothing: in Figure 18 of the AstraFlow paper dynamic sampling rolls out
720 thousand times where 200 thousand are trained. So three in ten are of two digits, soon always right, four in ten of
nine or ten digits, never right, and three in ten of the four to six digits that the evaluation asks.
"""

import json
import random
import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
SORT_DIGITS = HERE.parent / "sort_digits"
MIX = ((72, (2,)), (72, (4, 5, 6)), (96, (9, 10)))
"""How many prompts, of which lengths."""


def main() -> None:
    """Write the file beside this one; held-out prompts are left out."""
    base = runpy.run_path(str(SORT_DIGITS / "make_data.py"))
    lines = (SORT_DIGITS / "eval.jsonl").read_text("utf-8").splitlines()
    rng, seen, taken = random.Random(20261130), {json.loads(line)["prompt"] for line in lines}, []
    for count, lengths in MIX:
        goal = len(taken) + count
        while len(taken) < goal:
            row = base["row"](base["draw"](rng, lengths))
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                taken.append(row)
    rng.shuffle(taken)
    (HERE / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taken), "utf-8")


if __name__ == "__main__":
    main()
