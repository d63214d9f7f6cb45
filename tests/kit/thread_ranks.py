"""Ranks of a trainer as threads of one process, so that tests can try any count of them without starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.trainers.ranks import Ranks

T = TypeVar("T")


class Meeting:
    """Where the ranks put what they give to each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=120)
        self.slots: list[Any] = [None] * size


class ThreadRanks(Ranks):
    """A rank that meets the others in memory; every collective is called by all, in the same order."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, len(meeting.slots))
        self.device = torch.device("cpu")
        self.meeting = meeting

    def gather(self, value: T) -> list[T]:
        """See ``Ranks``."""
        self.meeting.slots[self.rank] = value
        self.meeting.barrier.wait()
        found = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return found

    def broadcast(self, value: T | None) -> T:
        """See ``Ranks``."""
        found: T = self.gather(value)[0]  # type: ignore[assignment]
        return found

    def sum_tensor(self, x: Tensor) -> None:
        """See ``Ranks``."""
        parts = self.gather(x.clone())
        x.copy_(torch.stack(parts).sum(0))


def ranks_of(size: int) -> list[ThreadRanks]:
    """So many ranks that meet each other."""
    meeting = Meeting(size)
    return [ThreadRanks(rank, meeting) for rank in range(size)]


def together(ranks: Sequence[ThreadRanks], work: Callable[[ThreadRanks], T]) -> list[T]:
    """What ``work`` gives on each rank, all at once. Raises what any of them raises."""
    out: list[Any] = [None] * len(ranks)
    errors: list[Exception] = []

    def run(one: ThreadRanks) -> None:
        try:
            out[one.rank] = work(one)
        except Exception as error:  # the seam of a thread: it is raised again in the test
            errors.append(error)
            one.meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(one,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return out


def on_ranks(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """``together`` on so many new ranks."""
    return together(ranks_of(size), work)
