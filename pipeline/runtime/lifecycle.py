"""The life of a task: created, restoring, running, suspended (partitions revoked, stores kept), closed.

Goes in: where a task stands and where it is to go; comes out: the new state, or an error that names the task and both
states. ``moved`` is the only way in which a state changes, so a task never runs on a store that is not restored.
"""

from collections.abc import Mapping
from enum import Enum

from headrace.schemas.errors import HeadraceError

__all__ = ("IllegalTransition", "TaskState", "moved")


class IllegalTransition(HeadraceError):
    """A task was to take a step that the life of a task does not have: a fault of the runtime, never of its input."""


class TaskState(Enum):
    """Where a task stands in its life."""

    CREATED = "created"
    RESTORING = "restoring"
    RUNNING = "running"
    SUSPENDED = "suspended"
    CLOSED = "closed"


_NEXT: Mapping[TaskState, frozenset[TaskState]] = {
    TaskState.CREATED: frozenset({TaskState.RESTORING, TaskState.CLOSED}),
    TaskState.RESTORING: frozenset({TaskState.RUNNING, TaskState.CLOSED}),
    TaskState.RUNNING: frozenset({TaskState.SUSPENDED, TaskState.CLOSED}),
    TaskState.SUSPENDED: frozenset({TaskState.RUNNING, TaskState.CLOSED}),
    TaskState.CLOSED: frozenset(),
}


def moved(task: str, state: TaskState, to: TaskState) -> TaskState:
    """``to``, when a task may go there from ``state``; ``task`` is its name for the message.

    Raises IllegalTransition.
    """
    if to not in _NEXT[state]:
        allowed = ", ".join(sorted(s.value for s in _NEXT[state])) or "nowhere"
        raise IllegalTransition(
            f"task {task} cannot go from {state.value} to {to.value} (from there it goes to {allowed}); this is a "
            "fault of the runtime: please report it with the log of this process"
        )
    return to
