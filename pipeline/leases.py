"""Who works on what: workers as their Demand shows them, leases, and work that waits for a worker (protocol 5).

A ``Work`` is one replica (or score, or evaluation sample) with its current attempt; it waits or is leased to one
incarnation of a worker. Decisions only: which records follow from them is written by ``prompt_to_task``.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from headrace.pipeline.runtime.stage import Store
from headrace.pipeline.state import key_of, scan_json
from headrace.pipeline.state import write_json as put
from headrace.schemas.config import RolloutConfig
from headrace.schemas.records import Demand

__all__ = ("Key", "Leases", "Work", "Worker")

Key = tuple[str, int, int]
"""Kind, group (or evaluation number), replica."""
Loss = Literal["lease", "deadline"]


@dataclass(slots=True, kw_only=True)
class Work:
    """One thing to do and its current attempt. ``worker`` is empty while it waits."""

    kind: str
    group: int
    replica: int
    order: int
    """Place in the queue: admission order of groups; what is negative goes before all of them."""
    attempt: int = 0
    failures: int = 0
    lost: int = 0
    worker: str = ""
    incarnation: int = 0
    sequence: int = -1
    deadline_ms: int = 0
    partial: int = -1
    avoid: str = ""
    cancelled: bool = False
    detail: dict[str, Any] = field(default_factory=dict)
    """What the kind needs: policy, version and prompt number of an evaluation, members of a score."""

    @property
    def key(self) -> Key:
        """Identity without the attempt."""
        return self.kind, self.group, self.replica


@dataclass(slots=True, kw_only=True)
class Worker:
    """A rollout worker by its newest Demand; ``issued`` is the sequence number of the next Task written to it."""

    name: str
    incarnation: int
    role: str
    capacity: int
    held: int
    read: int
    issued: int
    policies: dict[int, int]
    """Hosted policies with the versions loaded."""
    seen_ms: int = 0
    lost: bool = False

    def free(self) -> int:
        """Tasks that may still be given: capacity less what is held and what is written and not yet read."""
        return 0 if self.lost else self.capacity - self.held - (self.issued - self.read)

    def takes(self, kind: str, policies: tuple[int, ...]) -> bool:
        """Whether its role and its hosted policies fit."""
        if self.role in ("train", "eval") and (self.role == "eval") != (kind == "eval"):
            return False
        return all(p in self.policies for p in policies)

    def has_loaded(self, bounds: Mapping[int, int]) -> bool:
        """Whether it could start at once: every policy at its min version or newer."""
        return all(self.policies.get(p, -1) >= version for p, version in bounds.items())


_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in (Work, Worker)}


class Leases:
    """All work and all workers of a run."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.work: dict[Key, Work] = {}
        self.workers: dict[str, Worker] = {}
        self.of_worker: dict[str, set[Key]] = defaultdict(set)
        self.of_group: dict[int, set[Key]] = defaultdict(set)
        self.evaluations = 0
        self._deadlines: list[tuple[int, Key, int]] = []
        self._waiting: dict[tuple[bool, tuple[int, ...]], list[tuple[int, int, int, int, Key]]] = {}
        self._ticket = 0
        self._dirty: set[str] = set()

    def load(self, store: Store) -> list[Work]:
        """Take leases and workers from a store; gives the saved work that waits, to be queued by the caller."""
        for _, saved in scan_json(store, "worker"):
            saved["policies"] = {int(p): v for p, v in saved["policies"].items()}
            worker = Worker(**saved)
            self.workers[worker.name] = worker
        waiting = []
        for _, saved in scan_json(store, "work"):
            work = Work(**saved)
            if work.worker:
                self._add(work)
                self.of_worker[work.worker].add(work.key)
                heapq.heappush(self._deadlines, (work.deadline_ms, work.key, work.attempt))
            else:
                waiting.append(work)
        return waiting

    def queue(self, work: Work, policies: tuple[int, ...], store: Store | None = None) -> None:
        """Let work wait for a worker that hosts ``policies``; saved when a store is given."""
        self._add(work)
        self._ticket += 1
        rank = 1 if work.kind == "train" else 0
        heap = self._waiting.setdefault((work.kind == "eval", policies), [])
        heapq.heappush(heap, (work.order, rank, work.replica, self._ticket, work.key))
        if store is not None:
            self._save(work, store)

    def demand(self, record: Demand, now_ms: int, store: Store) -> list[Work]:
        """Fold a snapshot: ended leases go; gives the leases that an earlier incarnation has lost."""
        known = self.workers.get(record.worker)
        if known is not None and record.incarnation < known.incarnation:
            return []
        same = known is not None and known.incarnation == record.incarnation
        lost = [] if same else self.leases_of(record.worker)
        self.workers[record.worker] = Worker(
            name=record.worker, incarnation=record.incarnation, role=record.role, capacity=record.capacity,
            held=len(record.held), read=record.next_sequence, seen_ms=now_ms,
            issued=max(record.next_sequence, known.issued if known is not None and same else 0),
            policies={p.policy: p.version for p in record.policies},
        )  # fmt: skip
        self._dirty.add(record.worker)
        if same:
            held = {(h.kind, h.group, h.replica): h for h in record.held}
            for work in self.leases_of(record.worker):
                holds = held.get(work.key)
                if holds is not None and holds.attempt == work.attempt:
                    if holds.partial != work.partial and holds.partial >= 0:
                        work.partial = holds.partial
                        self._save(work, store)
                elif work.sequence < record.next_sequence:
                    self.remove(work, store)
        return lost

    def leases_of(self, worker: str) -> list[Work]:
        """The leases of a worker, in a fixed order."""
        return [self.work[key] for key in sorted(self.of_worker.get(worker, ()))]

    def silent(self, now_ms: int, reachable_since_ms: int) -> list[Worker]:
        """Workers that have sent no Demand for ``lease_seconds``; each is named once until it is heard again."""
        limit = now_ms - self.config.lease_seconds * 1000
        gone = [w for w in self.workers.values() if not w.lost and max(w.seen_ms, reachable_since_ms) < limit]
        for worker in gone:
            worker.lost = True
        return gone

    def overdue(self, before_ms: int) -> list[Work]:
        """Leases whose deadline lies before ``before_ms``; each is named once."""
        late = []
        while self._deadlines and self._deadlines[0][0] < before_ms:
            _, key, attempt = heapq.heappop(self._deadlines)
            work = self.work.get(key)
            if work is not None and work.worker and work.attempt == attempt:
                late.append(work)
        return late

    def retry(self, work: Work, loss: Loss, policies: tuple[int, ...], store: Store) -> bool:
        """Let lost work wait again as attempt + 1, elsewhere if possible; False when its attempts are used up."""
        self.of_worker[work.worker].discard(work.key)
        work.failures += loss == "deadline"
        work.lost += loss == "lease"
        if work.failures >= self.config.max_episode_failures or work.lost >= self.config.max_lost_leases:
            self.remove(work, store)
            return False
        work.attempt += 1
        work.avoid, work.worker, work.sequence = work.worker, "", -1
        self.queue(work, policies, store)
        return True

    def remove(self, work: Work, store: Store) -> None:
        """Forget work that has ended."""
        if self.work.pop(work.key, None) is None:
            return
        self.of_worker[work.worker].discard(work.key)
        if work.kind == "eval":
            self.evaluations -= 1
        else:
            self.of_group[work.group].discard(work.key)
            if not self.of_group[work.group]:
                del self.of_group[work.group]
        store.delete(_key(work))

    def next_waiting(
        self, now_free: list[Worker], bounds_of: Callable[[Work], Mapping[int, int]]
    ) -> tuple[Work, Worker] | None:
        """The first waiting work that a free worker can take, and that worker; the work leaves the queue.

        ``bounds_of`` gives the min version per policy of work.
        """
        best: tuple[tuple[int, int, int, int], list[Any], Work, Worker] | None = None
        for (evaluation, policies), heap in self._waiting.items():
            work = self._head(heap)
            if work is None or (best is not None and heap[0][:4] >= best[0]):
                continue
            kind = "eval" if evaluation else work.kind
            worker = self.best_worker(kind, policies, now_free, avoid=work.avoid, bounds=bounds_of(work))
            if worker is not None:
                best = (heap[0][:4], heap, work, worker)
        if best is None:
            return None
        heapq.heappop(best[1])
        return best[2], best[3]

    def waits(self, policies: tuple[int, ...]) -> bool:
        """Whether work other than evaluation waits for workers that host these policies."""
        heap = self._waiting.get((False, policies))
        return heap is not None and self._head(heap) is not None

    def best_worker(
        self,
        kind: str,
        policies: tuple[int, ...],
        free: list[Worker],
        *,
        avoid: str = "",
        bounds: Mapping[int, int] | None = None,
    ) -> Worker | None:
        """The fitting worker to give work to: another than ``avoid``, with new enough versions, most free capacity."""
        fits = [w for w in free if w.free() > 0 and w.takes(kind, policies)]
        if not fits:
            return None
        return max(fits, key=lambda w: (w.name != avoid, w.has_loaded(bounds or {}), w.free(), w.name))

    def lease(self, work: Work, worker: Worker, deadline_ms: int, store: Store) -> None:
        """Give work to a worker under its next sequence number."""
        work.worker, work.incarnation, work.sequence = worker.name, worker.incarnation, worker.issued
        work.deadline_ms = deadline_ms
        worker.issued += 1
        self.of_worker[worker.name].add(work.key)
        heapq.heappush(self._deadlines, (deadline_ms, work.key, work.attempt))
        self._dirty.add(worker.name)
        self._save(work, store)

    def cancel(self, group: int, store: Store) -> list[Work]:
        """Drop the waiting work of a group; gives its leases that have not been cancelled before."""
        told = []
        for key in sorted(self.of_group.get(group, ())):
            work = self.work[key]
            if not work.worker:
                self.remove(work, store)
            elif not work.cancelled:
                work.cancelled = True
                self._save(work, store)
                told.append(work)
        return told

    def flush(self, store: Store) -> None:
        """Write the workers that have changed since the last flush."""
        for name in self._dirty:
            worker = {**_plain(self.workers[name]), "seen_ms": 0, "lost": False}
            put(store, f"worker/{name}".encode(), worker)
        self._dirty.clear()

    def _head(self, heap: list[tuple[int, int, int, int, Key]]) -> Work | None:
        while heap:
            work = self.work.get(heap[0][4])
            if work is not None and not work.worker:
                return work
            heapq.heappop(heap)
        return None

    def _add(self, work: Work) -> None:
        if work.key in self.work:
            return
        self.work[work.key] = work
        if work.kind == "eval":
            self.evaluations += 1
        else:
            self.of_group[work.group].add(work.key)

    def _save(self, work: Work, store: Store) -> None:
        put(store, _key(work), _plain(work))


def _plain(value: Work | Worker) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _FIELDS[type(value)]}


def _key(work: Work) -> bytes:
    return key_of("work", {"train": 0, "score": 1, "eval": 2}[work.kind], work.group, work.replica)
