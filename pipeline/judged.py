"""What the Score of a group means for its members: parts of their reward, or exclusion for one that was not judged.

Pure functions. A member without a judgement never counts as reward 0 (protocol 6).
"""

from collections.abc import Mapping
from dataclasses import replace

from headrace.pipeline.members import Reported, is_usable
from headrace.schemas.parts import Reward
from headrace.schemas.records import Score

__all__ = ("judged_members", "scores_of")


def scores_of(score: Score | None) -> dict[int, list[Reward]]:
    """The parts that a Score gives, by replica."""
    out: dict[int, list[Reward]] = {}
    for part in score.scores if score is not None else ():
        if not part.error:
            out.setdefault(part.replica, []).append(Reward(name=part.name, value=part.value, detail=part.detail))
    return out


def judged_members(reported: Mapping[int, Reported], score: Score | None) -> dict[int, Reported]:
    """The members of a group: usable ones without a judgement are excluded with its reason.

    Without a Score, or with one that failed as a whole, they stay as they are: then the group fails.
    """
    if score is None or score.error:
        return dict(reported)
    have = scores_of(score)
    why = {part.replica: part.error for part in score.scores if part.error}
    out: dict[int, Reported] = {}
    for replica, (trajectory, place) in reported.items():
        if replica not in have and is_usable(trajectory):
            error = why.get(replica, "the group was judged without it")
            trajectory = replace(trajectory, status="excluded", error=error)
        out[replica] = (trajectory, place)
    return out
