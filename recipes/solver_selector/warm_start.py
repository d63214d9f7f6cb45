"""Make the two models that the run starts from: a solver that subtracts without borrowing, a selector of two answers.

Half of the solver's demonstrations are wrong, and a third of the selector's.

    python recipes/solver_selector/warm_start.py --out FOLDER [--seed 0]
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_team
from make_data import answer

WRONG = {"solver": 0.5, "selector": 0.33}


def problem(rng: random.Random) -> tuple[str, str, str]:
    """A question, its answer, and another answer that differs in one digit."""
    a, b = rng.randrange(1000), rng.randrange(1000)
    digits = list(answer(a, b))
    at = rng.randrange(3)
    digits[at] = str((int(digits[at]) + rng.choice((1, 9))) % 10)
    return f"{a:03d}-{b:03d}=", answer(a, b), "".join(digits)


def solver(rng: random.Random) -> tuple[str, str]:
    """`352-174=` and a difference."""
    question, right, wrong = problem(rng)
    return question, wrong if rng.random() < WRONG["solver"] else right


def selector(rng: random.Random) -> tuple[str, str]:
    """`352-174=288;287?` and which of the two."""
    question, right, wrong = problem(rng)
    first = rng.random() < 0.5
    shown = (right, wrong) if first else (wrong, right)
    chosen = "A" if first != (rng.random() < WRONG["selector"]) else "B"
    return f"{question}{shown[0]};{shown[1]}?", f"<final>{chosen}</final>"


if __name__ == "__main__":
    tiny_team.main({"solver": solver, "selector": selector}, steps=500)
