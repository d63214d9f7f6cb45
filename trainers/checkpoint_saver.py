"""Takes checkpoints beside training and gives the newest good one back (protocol 8).

A save copies every rank's state to host memory and returns; threads write the copies, and rank 0 adds the table once
all ranks have delivered. Until then the checkpoint does not exist. A save that fails is said and tried again later;
a checkpoint that turns out broken is said and passed over.
"""

import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from headrace.connectors.checkpoints import BrokenCheckpoint, CheckpointFile, CheckpointTable, digest_of
from headrace.connectors.lifetime import StopSignal
from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.trainers.backends.backend import Backend, Snapshots
from headrace.trainers.checkpoint import Checkpoint, Delivery, Place, Positions, Save
from headrace.trainers.checkpoint_folder import blocks_of
from headrace.trainers.lanes import Stopped
from headrace.trainers.lineage import Point
from headrace.trainers.patience import patiently
from headrace.trainers.ranks import Ranks

__all__ = ("CheckpointFailed", "Checkpoints")

_LONGEST_GAP = 8
"""Batches after which a save that failed again and again is tried anew."""
_RETRY_SECONDS = 5.0


class CheckpointFailed(HeadraceError):
    """A rank could not write its part; training goes on."""


class _Under:
    """A save under way on this rank, as its thread and the main thread see it."""

    def __init__(self, point: Point, began: float, held: float) -> None:
        self.point, self.held = point, held
        self.abandoned = False
        self._began = began
        self._work: Future[float] = Future()

    def run(self, work: Callable[[], None]) -> None:
        """In the thread."""
        try:
            work()
        except (CheckpointFailed, Stopped) as error:
            self._work.set_exception(error)
        else:
            self._work.set_result(time.monotonic() - self._began)

    def state(self) -> str | Stopped | None:
        """None: not ended; an empty text: done; a text: what went wrong."""
        if not self._work.done():
            return None
        error = self._work.exception()
        return error if isinstance(error, Stopped) else str(error) if error else ""

    def seconds(self) -> float:
        """From the copy to the end."""
        return self._work.result()

    def wait(self, seconds: float) -> None:
        """Wait for the end, not longer."""
        with suppress(TimeoutError):
            self._work.exception(seconds)


class Checkpoints:
    """The checkpoints of one policy, on every rank; all ranks call the collective methods together.

    keep: the newest that are kept. keep_every: those of batches that are multiples of it are kept as well, 0: none.
    beside: write while training goes on.
    """

    def __init__(
        self,
        place: Place,
        backend: Backend,
        ranks: Ranks,
        stop: StopSignal,
        *,
        keep: int,
        keep_every: int = 0,
        beside: bool = True,
    ) -> None:
        self._place, self._backend, self._ranks, self._stop = place, backend, ranks, stop
        self._keep, self._keep_every, self._beside = keep, keep_every, beside
        self._under: _Under | None = None
        self._gap, self._again_at, self._put_off = 0, 0, False
        self.durable = -1
        """The batch of the newest checkpoint that this process wrote or loaded; the same on every rank."""
        self._figures: dict[str, float] = {}
        self._failed = 0

    # reading

    def listed(self) -> list[Checkpoint]:
        """Rank 0: checkpoints by their tables, oldest first; broken ones are said."""
        whole, broken = patiently(self._place.listed, self._stop)
        for problem in broken:
            self._say(f"passing over a broken checkpoint: {problem}")
        return whole

    def verified(self, checkpoint: Checkpoint) -> bool:
        """Rank 0: whether every byte is as it was written; if not, it is said."""
        try:
            patiently(lambda: self._place.check(checkpoint), self._stop)
        except BrokenCheckpoint as problem:
            self._say(f"checkpoint of batch {checkpoint.point.batch} is broken, an older one has to do: {problem}")
            return False
        return True

    def load(self, checkpoint: Checkpoint) -> None:
        """Collective: put the backend's state back. Raises ConfigurationError when it is another model's, and
        BrokenCheckpoint when it was replaced or deleted meanwhile: a new start finds what is there then.
        """
        folder = patiently(lambda: self._place.fetch(checkpoint), self._stop)
        try:
            self._backend.load(folder)
        except (OSError, ConfigurationError) as error:
            # A predecessor that does not know yet that it is fenced may still write or prune.
            if checkpoint in patiently(self._place.listed, self._stop)[0]:
                raise
            raise BrokenCheckpoint(
                f"{checkpoint.where} was replaced or deleted by another trainer of this policy while it was loaded; "
                f"start again ({error})"
            ) from error
        self._ranks.barrier()
        self._place.release(folder)
        self.durable = checkpoint.point.batch

    def sweep(self) -> None:
        """Rank 0, after predecessors were fenced: remove what they left half written."""
        patiently(self._place.sweep, self._stop)

    # writing

    def due(self, batch: int, every: int) -> bool:
        """Whether to save after this batch: by its number, or because a save has failed or was put off.

        While the save before is still under way it is put off, and training does not wait.
        """
        wanted = batch % every == 0 or 0 < self._again_at <= batch or self._put_off
        if wanted and self._under is not None:
            if not self._put_off:
                self._say(f"batch {self._under.point.batch} is still being written; that of batch {batch} comes later")
            self._put_off = True
            return False
        return wanted

    def save(self, point: Point, positions: Positions) -> None:
        """Collective: begin to save the state as it is now; waits for the save before, if that is still under way."""
        self.settle()
        self._put_off = False
        began = time.monotonic()
        save = Save(f"{point.lineage:04d}-{point.batch:09d}", self._ranks.broadcast(uuid.uuid4().hex[:12]))
        work: Callable[[], None]
        if isinstance(self._backend, Snapshots):
            part = self._backend.snapshot()
            work = partial(self._write, save, point, positions, part.write, None, self._ranks.size)
        else:
            # All ranks write into rank 0's folder, which they must share, and wait for each other.
            room = self._ranks.broadcast(self._place.room(save, 0) if self._ranks.leads else None)
            self._backend.save(room)
            self._ranks.barrier()
            work = partial(self._write, save, point, positions, None, room, 1) if self._ranks.leads else _nothing
        self._under = _Under(point, began, time.monotonic() - began)
        threading.Thread(target=self._under.run, args=(work,), name="checkpoint", daemon=True).start()
        if not self._beside:
            self.settle()

    def _write(
        self,
        save: Save,
        point: Point,
        positions: Positions,
        write: Callable[[Path], None] | None,
        room: Path | None,
        parts: int,
    ) -> None:
        """In the thread: this rank's part; on rank 0 also the table, once all parts are there."""
        rank, place = self._ranks.rank, self._place
        try:
            room = room or place.room(save, rank)
            if write is not None:
                write(room)
            delivery = Delivery(_files_in(room))
            patiently(lambda: place.deliver(save, rank, delivery), self._stop)
            if self._ranks.leads:
                self._complete(save, point, positions, parts)
        except Stopped:
            raise
        except Exception as error:  # the seam of this thread: whatever a disk or a library does, training goes on
            problem = f"rank {rank}: {type(error).__name__}: {error}"
            self._give_up(save, problem)
            raise CheckpointFailed(problem) from error

    def _complete(self, save: Save, point: Point, positions: Positions, parts: int) -> None:
        pause = 0.01
        while len(found := patiently(lambda: self._place.delivered(save), self._stop)) < parts:
            if self._stop.wait(pause):
                raise Stopped(f"stopping: {self._stop.reason}")
            if self._under is not None and self._under.abandoned:
                raise CheckpointFailed("another rank could not write its part")
            pause = min(1.0, pause * 1.5)
        problems = [one.problem for one in found.values() if one.problem]
        if problems:
            raise CheckpointFailed("; ".join(problems))
        table = CheckpointTable(
            lineage=point.lineage,
            batch=point.batch,
            version=point.version,
            manifests=positions.manifests,
            lanes=positions.lanes,
            written_ms=int(time.time() * 1000),
            files={name: file for one in found.values() for name, file in sorted(one.files.items())},
        )
        patiently(lambda: self._place.commit(save, table), self._stop)

    def _give_up(self, save: Save, problem: str) -> None:
        """Tell rank 0, or as rank 0 free the space."""
        try:
            if self._ranks.leads:
                self._place.discard(save)
            else:
                self._place.deliver(save, self._ranks.rank, Delivery({}, problem))
        except (OSError, HeadraceError) as error:  # the place itself may be what is broken
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {self._place.url}: cannot tidy up {save.name}: {error}\n")

    def poll(self) -> bool:
        """Collective: take note of a save that has ended, well or not; True when none is under way any more.

        Raises Stopped on all ranks.
        """
        under = self._under
        if under is None:
            return True
        states = self._ranks.gather(under.state())
        if states[0] is None:
            under.abandoned = any(isinstance(state, str) and state for state in states)
            return False
        problems = [state for state in states if isinstance(state, str) and state]
        self._under = None
        if any(isinstance(state, Stopped) for state in states):
            raise Stopped(f"stopping: {self._stop.reason}")
        self._note(under, states[0] if isinstance(states[0], str) else "", problems)
        return True

    def settle(self) -> None:
        """Collective: wait for the save under way. Raises Stopped on all ranks."""
        pause = 0.001
        while not self.poll():
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)

    def _note(self, under: _Under, failed: str, problems: list[str]) -> None:
        """Rank 0's outcome counts for all."""
        if not failed:
            self.durable = max(self.durable, under.point.batch)
            self._gap = self._again_at = 0
            if self._ranks.leads:  # another rank may have delivered and failed after that
                self._figures |= {"checkpoint/copy_seconds": under.held, "checkpoint/seconds": under.seconds()}
            return
        self._failed += 1
        self._figures["checkpoint/failed"] = float(self._failed)
        self._gap = min(_LONGEST_GAP, 2 * self._gap or 1)
        self._again_at = under.point.batch + self._gap
        newest = f"the newest is of batch {self.durable}" if self.durable >= 0 else "there is none yet"
        self._say(
            f"no checkpoint of batch {under.point.batch} ({self._failed} have failed, {newest}): "
            f"{'; '.join(problems)}; training goes on, the next try is at batch {self._again_at}"
        )

    def figures(self) -> dict[str, float]:
        """Figures since the last call, for a Step: seconds to copy and to write a checkpoint, saves that failed."""
        figures, self._figures = self._figures, {}
        return figures

    def save_last(self, point: Point, positions: Positions) -> None:
        """Collective: save until it is durable; a run has not ended without its last checkpoint. Raises Stopped."""
        while True:
            self.settle()
            if self.durable >= point.batch:
                return
            self.save(point, positions)
            self.settle()
            if self.durable >= point.batch:
                return
            stopped = self._stop.wait(_RETRY_SECONDS) if self._ranks.leads else None
            if self._ranks.broadcast(stopped):
                raise Stopped(f"stopping: {self._stop.reason}")

    # keeping

    def prune(self, base: Point | None, lineage: int) -> None:
        """Rank 0, right after a commit to Kafka has shown that no other trainer has taken over: delete old ones.

        The newest ``keep`` of the lineage's own way stay, and the one that the lineage in force starts from.
        """
        whole, _ = patiently(self._place.listed, self._stop)
        if any(one.point.lineage > lineage for one in whole):
            return  # a successor is at work: what it needs is not known here
        for old in whole[: -self._keep]:
            kept = self._keep_every and old.point.batch % self._keep_every == 0
            if old.point != base and not kept:
                patiently(lambda old=old: self._place.remove(old), self._stop)  # type: ignore[misc]

    def forget_after(self, batch: int) -> None:
        """Rank 0: delete the checkpoints beyond a batch: training goes on from before them."""
        for later in patiently(self._place.listed, self._stop)[0]:
            if later.point.batch > batch:
                patiently(lambda later=later: self._place.remove(later), self._stop)  # type: ignore[misc]

    def close(self, seconds: float = 2.0) -> None:
        """Give a save under way a moment to end; what is unfinished then is never a checkpoint."""
        if self._under is not None:
            self._under.wait(seconds)

    def _say(self, text: str) -> None:
        if self._ranks.leads:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} checkpoints in {self._place.url}: {text}\n")
            sys.stderr.flush()


def _nothing() -> None:
    """What ranks beside rank 0 have left to do."""


def _files_in(room: Path) -> dict[str, CheckpointFile]:
    paths = sorted(path for path in room.rglob("*") if path.is_file())
    return {
        path.relative_to(room).as_posix(): CheckpointFile(path.stat().st_size, digest_of(blocks_of(path)))
        for path in paths
    }
