"""Every pair of states: the steps that a task's life has, and the words for those that it has not."""

from __future__ import annotations

from itertools import product

import pytest

from headrace.pipeline.runtime.lifecycle import IllegalTransition, TaskState, moved
from headrace.schemas.errors import HeadraceError

LEGAL = {
    ("created", "restoring"),
    ("restoring", "running"),
    ("running", "suspended"),
    ("suspended", "running"),
    *((state, "closed") for state in ("created", "restoring", "running", "suspended")),
}


@pytest.mark.parametrize(("state", "to"), list(product(TaskState, TaskState)))
def test_only_the_steps_of_a_life_are_taken(state: TaskState, to: TaskState) -> None:
    if (state.value, to.value) in LEGAL:
        assert moved("batch[2]", state, to) is to
        return
    with pytest.raises(IllegalTransition, match=rf"batch\[2\] cannot go from {state.value} to {to.value}"):
        moved("batch[2]", state, to)


def test_the_error_is_one_of_ours_and_says_where_the_task_could_go() -> None:
    with pytest.raises(HeadraceError, match=r"from there it goes to closed, restoring"):
        moved("batch[2]", TaskState.CREATED, TaskState.RUNNING)
    with pytest.raises(HeadraceError, match="goes to nowhere"):
        moved("batch[2]", TaskState.CLOSED, TaskState.RUNNING)
