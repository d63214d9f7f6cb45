"""Make the two models that the run starts from: a solver that finds programs, a tester that writes cases for them.

Two in five of the solver's demonstrations are wrong; two in five of the tester's have a case that is wrong, and some
are cut off.

    python recipes/solver_testgen/warm_start.py --out FOLDER [--seed 0]
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_team
from make_data import program, question

WRONG, CUT = 0.4, 0.1


def candidate(rng: random.Random) -> tuple[int, int, str]:
    """A function and a program for it, wrong in its factor or its term in two cases of five."""
    k, c = rng.randrange(9), rng.randrange(100)
    if rng.random() >= WRONG:
        return k, c, program(k, c)
    return k, c, rng.choice((program((k + 1) % 9, c), program(k, (c + rng.choice((1, 9, 10))) % 100)))


def solver(rng: random.Random) -> tuple[str, str]:
    """`0:5;1:8;2:11=`, or the same with `3*x+6!` after a failure, and a program."""
    k, c, written = candidate(rng)
    asked = question(k, c)
    if rng.random() < 0.3:
        asked += f"{program(k, (c + rng.choice((1, 99))) % 100)}!"
    return asked, written


def tester(rng: random.Random) -> tuple[str, str]:
    """`0:5;1:8;2:11=3*x+6?` and two cases as JSON."""
    k, c, written = candidate(rng)
    places = rng.sample(range(6), 2)
    outputs = [k * x + c for x in places]
    if rng.random() < WRONG:
        outputs[rng.randrange(2)] += rng.choice((-1, 1, 10))
    said = json.dumps({"inputs": [[x] for x in places], "outputs": outputs}, separators=(",", ":"))
    return f"{question(k, c)}{written}?", said[:-2] if rng.random() < CUT else said


if __name__ == "__main__":
    tiny_team.main({"solver": solver, "tester": tester}, steps=700)
