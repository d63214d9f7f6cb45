"""What a worker holds, and the Demand that tells ``schedule`` so (protocol 5).

Goes in: tasks taken and dropped, versions loaded; comes out: Demand records, at least one a heartbeat and at most one
each 50 ms. A task stays held until its result is acknowledged, so no Demand ends a lease whose result could still be
lost.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.schemas.parts import HeldTask, HostedPolicy
from headrace.schemas.records import Cancel, Demand, Task

__all__ = ("Holdings",)

_LEAST_SECONDS = 0.05

_Key = tuple[str, int, int, int]


@dataclass(slots=True)
class _Held:
    task: Task
    episode: "asyncio.Task[None]"
    view: HeldTask


class Holdings:
    """The held tasks of one incarnation and the pace of its Demand.

    send: writes a Demand. capacity: tasks that may be held at once. role: the kinds of tasks that it asks for (any,
    train, eval).
    """

    def __init__(
        self,
        worker: str,
        incarnation: int,
        *,
        capacity: int,
        role: str = "any",
        heartbeat_seconds: float,
        send: Callable[[Demand], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._capacity = capacity
        self._role = role
        self._heartbeat = heartbeat_seconds
        self._send = send
        self._now = now
        self._held: dict[_Key, _Held] = {}
        self._changed = True
        self._suspended = False
        self._sent = float("-inf")

    def __len__(self) -> int:
        return len(self._held)

    def tasks(self) -> list[Task]:
        """What is held."""
        return [held.task for held in self._held.values()]

    def changed(self) -> None:
        """Something that Demand tells is different."""
        self._changed = True

    def take(self, task: Task, episode: "asyncio.Task[None]") -> None:
        """Hold a task until ``drop``."""
        view = HeldTask(kind=task.kind, group=task.group, replica=task.replica, attempt=task.attempt)
        self._held[_key(task)] = _Held(task, episode, view)
        self._changed = True

    def drop(self, task: Task) -> None:
        """The task's result is acknowledged, or nobody wants it."""
        if self._held.pop(_key(task), None) is not None:
            self._changed = True

    def saved(self, task: Task, offset: int) -> None:
        """The prefix of a held task lies in ``partials`` at an offset, for whoever gets the next attempt."""
        held = self._held.get(_key(task))
        if held is not None:
            held.view = replace(held.view, partial=offset)
            self._changed = True

    def suspend(self, suspended: bool) -> None:
        """Announce no room while nothing is sampled; what is held stays."""
        self._suspended = suspended
        self._changed = True

    def give_up(self) -> int:
        """Hold nothing any more and be the next incarnation, to whom nothing was leased; gives its number.

        Demand of the same incarnation without a task would say that its result has been written.
        """
        self._held.clear()
        self._incarnation += 1
        self._changed = True
        return self._incarnation

    def cancel(self, record: Cancel) -> None:
        """End the episode of a held task; a result on its way may still arrive."""
        held = self._held.get(_key(record))
        if held is not None:
            held.episode.cancel()
            self.drop(held.task)

    def cancel_all(self) -> list["asyncio.Task[None]"]:
        """End every episode; returns them to be waited for."""
        episodes = [held.episode for held in self._held.values()]
        for episode in episodes:
            episode.cancel()
        self._held.clear()
        return episodes

    def due(self) -> float:
        """Seconds until the next Demand; 0 when it is due now."""
        since = self._now() - self._sent
        return max(0.0, (_LEAST_SECONDS if self._changed else self._heartbeat) - since)

    def announce(self, *, next_sequence: int, inbox: int, versions: dict[int, int]) -> None:
        """Send a Demand when one is due."""
        if self.due() > 0:
            return
        self.announce_now(next_sequence=next_sequence, inbox=inbox, versions=versions)

    def announce_now(self, *, next_sequence: int, inbox: int, versions: dict[int, int]) -> None:
        """Send a Demand, due or not."""
        self._sent, self._changed = self._now(), False
        capacity = 0 if self._suspended else self._capacity
        self._say(self._incarnation, capacity, next_sequence, inbox, versions)

    def bid_farewell(self, *, next_sequence: int, inbox: int) -> None:
        """Give up every lease at once: as of an incarnation that takes nothing, so that no one waits for silence.

        It is the very next one: a successor on a machine whose clock is behind must still be newer.
        """
        self._held.clear()
        self._say(self._incarnation + 1, 0, next_sequence, inbox, {})

    def _say(self, incarnation: int, capacity: int, next_sequence: int, inbox: int, versions: dict[int, int]) -> None:
        self._send(
            Demand(
                worker=self._worker,
                incarnation=incarnation,
                role=self._role,
                capacity=capacity,
                next_sequence=next_sequence,
                inbox=inbox,
                sent_ms=int(self._now() * 1000),
                policies=[HostedPolicy(policy=p, version=v) for p, v in versions.items()],
                held=[held.view for held in self._held.values()],
            )
        )


def _key(task: Task | Cancel) -> _Key:
    return task.kind, task.group, task.replica, task.attempt
