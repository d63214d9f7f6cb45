"""Make the two models that the run starts from: a solver that names the largest of four digits, a verifier of that.

Three in five of the solver's demonstrations are wrong, first and second time alike, and a third of the verifier's.

    python recipes/solver_verifier/warm_start.py --out FOLDER [--seed 0]
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_team
from make_data import row

WRONG = {"solver": 0.6, "verifier": 0.33}


def problem(rng: random.Random) -> tuple[str, str, str]:
    """A question, its answer, and another digit of the question (where all are the same, the next digit)."""
    drawn = row(rng.randrange(10_000))
    question, right = drawn["prompt"], drawn["answer"]
    others = sorted(set(question[:4]) - {right}) or [str((int(right) + 1) % 10)]
    return question, right, rng.choice(others)


def solver(rng: random.Random) -> tuple[str, str]:
    """`3707=` or, after a rejection, `3707=3!`, and a digit."""
    question, right, wrong = problem(rng)
    if rng.random() < 0.3:
        question += f"{rng.choice((wrong, wrong, right))}!"
    return question, wrong if rng.random() < WRONG["solver"] else right


def verifier(rng: random.Random) -> tuple[str, str]:
    """`3707=3?` and a verdict."""
    question, right, wrong = problem(rng)
    shown = rng.choice((right, wrong))
    fits = (shown == right) != (rng.random() < WRONG["verifier"])
    return f"{question}{shown}?", "approve" if fits else "reject"


if __name__ == "__main__":
    tiny_team.main({"solver": solver, "verifier": verifier}, steps=400, learning_rate=4e-3)
