"""Make the two models that the run starts from: a solver that adds without carrying, a verifier that judges it.

Three in five of the solver's demonstrations are wrong, first and second time alike, and a third of the verifier's.

    python recipes/solver_verifier/warm_start.py --out FOLDER [--seed 0]
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_team
from make_data import answer

WRONG = {"solver": 0.6, "verifier": 0.33}


def problem(rng: random.Random) -> tuple[str, str, str]:
    """A question, its answer, and another answer that differs in one digit."""
    a, b = rng.randrange(100), rng.randrange(100)
    right = answer(a, b)
    at = rng.randrange(2)
    other = str((int(right[at]) + rng.choice((1, 2, 8, 9))) % 10)
    return f"{a:02d}+{b:02d}=", right, right[:at] + other + right[at + 1 :]


def solver(rng: random.Random) -> tuple[str, str]:
    """`37+45=` or, after a rejection, `37+45=73!`, and a sum."""
    question, right, wrong = problem(rng)
    if rng.random() < 0.3:
        question += f"{rng.choice((wrong, wrong, right))}!"
    return question, wrong if rng.random() < WRONG["solver"] else right


def verifier(rng: random.Random) -> tuple[str, str]:
    """`37+45=73?` and a verdict."""
    question, right, wrong = problem(rng)
    shown = rng.choice((right, wrong))
    fits = (shown == right) != (rng.random() < WRONG["verifier"])
    return f"{question}{shown}?", "approve" if fits else "reject"


if __name__ == "__main__":
    tiny_team.main({"solver": solver, "verifier": verifier}, steps=500)
