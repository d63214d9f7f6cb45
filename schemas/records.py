"""Every record that travels: the union, the table by name, and one place to import them from.

The dataclasses stand in ``control_records`` (what steers a run) and ``data_records`` (what carries data). Each has a
schema of the same name (``<Name>.avsc``, made from the dataclass by ``python -m headrace.schemas.avsc``) and a place in
``topics.TOPICS``.
"""

from headrace.schemas.control_records import (
    CLOSE_REASONS,
    TASK_KINDS,
    Admission,
    Batched,
    Cancel,
    Closed,
    Demand,
    Failed,
    Kept,
    NeedsScore,
    Opened,
    Resume,
    RunEnd,
    RunManifest,
    Skipped,
    Stop,
    Suspend,
    Taken,
    Task,
    Trained,
)
from headrace.schemas.data_records import (
    END_REASONS,
    MEMBER_STATUSES,
    End,
    EvalResult,
    Group,
    Head,
    Item,
    Manifest,
    Member,
    Partial,
    Prompt,
    Resumed,
    Rollback,
    Score,
    Step,
    Trajectory,
)

__all__ = (
    "CLOSE_REASONS",
    "END_REASONS",
    "MEMBER_STATUSES",
    "RECORD_TYPES",
    "TASK_KINDS",
    "Admission",
    "Batched",
    "Cancel",
    "Closed",
    "Demand",
    "End",
    "EvalResult",
    "Failed",
    "Group",
    "Head",
    "Item",
    "Kept",
    "Manifest",
    "Member",
    "NeedsScore",
    "Opened",
    "Partial",
    "Prompt",
    "Record",
    "Resume",
    "Resumed",
    "Rollback",
    "RunEnd",
    "RunManifest",
    "Score",
    "Skipped",
    "Step",
    "Stop",
    "Suspend",
    "Taken",
    "Task",
    "Trained",
    "Trajectory",
)

Record = (
    RunManifest | RunEnd | Taken | Prompt | End | Demand | Task | Cancel | Suspend | Resume | Stop | Admission | Failed
    | Trajectory | Score | Partial | Member | Group | Opened | Skipped | Kept | NeedsScore | Closed | Batched | Trained
    | Item | Manifest | Step | Rollback | Resumed | Head | EvalResult
)  # fmt: skip
"""Any record."""

RECORD_TYPES: dict[str, type[Record]] = {
    cls.__name__: cls
    for cls in (
        RunManifest, RunEnd, Taken, Prompt, End, Demand, Task, Cancel, Suspend, Resume, Stop, Admission, Failed,
        Trajectory, Score, Partial, Member, Group, Opened, Skipped, Kept, NeedsScore, Closed, Batched, Trained, Item,
        Manifest, Step, Rollback, Resumed, Head, EvalResult,
    )
}  # fmt: skip
"""Record classes by name."""
