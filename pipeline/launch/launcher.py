"""One run from its first process to its report: starts the parts, watches them, ends them, leaves the run folder.

The launcher takes no part in the data's way; when it dies, parts notice and stop, and a new one goes on (``resume``).
It guarantees that no process of the run outlives it, whichever way it ends.
"""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.schema_ids import take_schema_ids
from headrace.pipeline.evaluated import AVERAGE
from headrace.pipeline.launch.display import Display
from headrace.pipeline.launch.folder import RunFolder, Session
from headrace.pipeline.launch.local_broker import forget_live, note_live, start_broker
from headrace.pipeline.launch.memory import MemorySampler
from headrace.pipeline.launch.parts import Part, Rollback, parts_of
from headrace.pipeline.launch.prepare import create_topics, warm_start
from headrace.pipeline.launch.supervisor import Supervisor
from headrace.pipeline.progress import Follower, figures_of, line_of, waits_for
from headrace.pipeline.run_records import read_records
from headrace.schemas.access import LAUNCHER
from headrace.schemas.codec import to_plain
from headrace.schemas.config import EvalConfig, RunConfig, dump_config
from headrace.schemas.errors import ConfigurationError, HeadraceError
from headrace.schemas.records import EvalResult, RunEnd, Step

__all__ = ("Launcher", "NothingUsable", "Stalled")

ALARM_SECONDS = 30.0
"""Time without progress after which the launcher says what the run waits for."""
_AWAY_SECONDS = 10.0
"""A cluster that has not answered for so long is what a run that stands still waits for."""
_GRACE_SECONDS = 20.0
_FULL_BYTES = 8 << 20
"""With less free space than this the run folder's disk is named as the reason of a standstill."""
_SOURCE_GRACE_SECONDS = 5.0
_EARLY_SECONDS = 3.0
"""Time after which a part that ended well is missed, unless the run's end mark has been read by then."""


class Stalled(HeadraceError):
    """Nothing has moved for ``run.patience_seconds``."""


class NothingUsable(HeadraceError):
    """Every group fails."""


class Launcher:
    """Runs one session of a run. Use as a context manager: leaving it ends every process."""

    def __init__(
        self, config: RunConfig, *, resume: bool, rollback: Rollback | None, command: Sequence[str], display: Display
    ) -> None:
        self.config = config
        self.folder = RunFolder.of(config)
        self._resume = resume
        self._rollback = rollback
        self._command = shlex.join(command)
        self._display = display
        self._began = time.monotonic()
        self._started = time.time()
        self._outcome = "failed"
        self._bootstrap = ""
        self._stop = StopSignal()
        run = config.run
        self._supervisor = Supervisor(
            self.folder.logs, max_restarts=run.max_restarts, window_seconds=run.restart_window_seconds
        )
        self._memory = MemorySampler(lambda: [os.getpid(), *self._supervisor.pids()])

    def __enter__(self) -> "Launcher":
        self.folder.create()
        self._lock = self.folder.lock()
        if not self._resume:
            dump_config(self.config, self.folder.config)
        self._stop.listen(with_parent=False)
        self._memory.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_parts()
        self._supervisor.stop(["broker"], grace_seconds=_GRACE_SECONDS)
        forget_live(self.folder)
        os.close(self._lock)

    def run(self, write_report: Callable[[RunFolder, Connection], None]) -> str:
        """Run to the end; returns ``finished`` or ``interrupted``. Raises HeadraceError with the reason of a failure.

        ``write_report`` is called once the parts have ended, while the topics can still be read.
        """
        warm_start(self.config, sys.executable, self._display.note, self._stop.is_set)
        if self._stop.is_set():
            return self._ended("interrupted")
        bootstrap = self.config.kafka.bootstrap
        if not bootstrap:
            bootstrap = start_broker(self._supervisor, self.folder.broker)
            self._display.note(f"local broker at {bootstrap} (single node, loopback, unreplicated)")
        note_live(self.folder, bootstrap)
        connection = Connection.of(self.config.kafka, self.config.run.id, bootstrap, role=LAUNCHER)
        connection.wait_for_broker(stopped=self._stop.is_set)
        if self._stop.is_set():
            return self._ended("interrupted")
        take_schema_ids(connection, self.config.registry)
        create_topics(self.config, connection, resume=self._resume)
        dump_config(self.config, self.folder.config)  # only now: settings that the run refuses must not stay in it
        if self._resume and self._has_ended(connection):
            write_report(self.folder, connection)
            return self._ended("finished")
        for part in parts_of(self.config, self.folder.config, bootstrap, rollback=self._rollback):
            self._supervisor.start(part)
        self._bootstrap = bootstrap
        try:
            self._ended(self._watch(connection))
        finally:
            self._end_parts()
            self._display.close()
            try:
                self._note_session()
            except OSError as error:
                self._display.note(f"{self.folder.sessions_file} cannot be written: {error}")
            write_report(self.folder, connection)
        return self._outcome

    def _has_ended(self, connection: Connection) -> bool:
        """Say so when the run's end mark stands: there is nothing to go on with."""
        if not any(isinstance(record, RunEnd) for _, record in read_records(connection, "run")):
            return False
        if self._rollback is not None:
            raise ConfigurationError(f"--from is refused: run {self.config.run.id} has finished")
        self._display.note(f"run {self.config.run.id} has finished: nothing is left to go on with")
        return True

    def _watch(self, connection: Connection) -> str:
        metrics = _MetricsLog(self.folder.metrics, self.config.eval)
        follower = Follower(connection, metrics.take)
        alarmed, sources_since = False, 0.0
        try:
            while True:
                if self._stop.is_set():
                    self._display.note(f"{self._stop.reason}: stopping all parts")
                    return "interrupted"
                for message in (*self._supervisor.check(), *self._revive(follower)):
                    self._display.note(message)
                follower.poll(0.2)
                follower.count(2.0)
                self._note_rollback(follower)
                self._show(follower)
                left = self._supervisor.running("operators", "source", "rollout", "trainer")
                if not left:
                    follower.poll(1.0)
                    self._show(follower)
                    return "finished"
                if set(left) == set(self._supervisor.running("source")):
                    sources_since = sources_since or time.monotonic()
                    if time.monotonic() - sources_since > _SOURCE_GRACE_SECONDS:
                        self._supervisor.stop(left, grace_seconds=_GRACE_SECONDS)
                alarmed = self._alarm(follower, left, alarmed)
                self._refuse_failures(follower)
        finally:
            metrics.close(follower)
            follower.close()

    def _revive(self, follower: Follower) -> list[str]:
        """Start parts again that ended well (a signal from outside) while the run still needs them."""
        if follower.tally.ended:
            return []
        early = self._supervisor.finished(for_seconds=_EARLY_SECONDS)
        return [self._supervisor.revive(part.name) for part in early if self._needed(part, follower)]

    def _needed(self, part: Part, follower: Follower) -> bool:
        if part.role == "trainer":
            index = self.config.policy_names().index(part.name.removeprefix("trainer-"))
            return not follower.tally.policies[index].stopped
        if part.role == "source":
            return not self.config.streams[part.name.removeprefix("source-")].epochs
        return part.role != "broker"

    def _note_rollback(self, follower: Follower) -> None:
        """Once the Rollback stands in the topic, a trainer that dies is started without asking for it again."""
        trained = sum(not policy.frozen for policy in self.config.policies.values())
        if self._rollback is None or follower.tally.rollbacks_since(self._started * 1000) < trained:
            return
        self._rollback = None
        for part in parts_of(self.config, self.folder.config, self._bootstrap):
            self._supervisor.replace(part)

    def _show(self, follower: Follower) -> None:
        seconds = time.monotonic() - self._began
        lines = [
            line_of(
                figures,
                seconds=seconds,
                rollouts=follower.rollouts,
                per_second=follower.rollouts_per_second,
                dead_letters=follower.dead_letters,
            )
            for figures in figures_of(self.config, follower.tally)
        ]
        self._display.update(lines)

    def _alarm(self, follower: Follower, left: list[str], alarmed: bool) -> bool:
        """Say what a run that stands still waits for, once; give up after the configured patience."""
        still = time.monotonic() - follower.last_progress
        if still < ALARM_SECONDS:
            return False
        away = follower.silence()
        reason = waits_for(
            self.config,
            follower.tally,
            now_ms=int(time.time() * 1000),
            troubled=self._supervisor.troubled(),
            waiting=self._supervisor.waiting(),
            running=left,
            broker=f"Kafka at {follower.address} has not answered for {away:.0f} s" if away > _AWAY_SECONDS else "",
        )
        free = shutil.disk_usage(self.folder.path).free
        if free < _FULL_BYTES:
            reason = f"the disk of {self.folder.path} is full ({free} bytes free): make room; {reason}"
        if not alarmed:
            self._display.note(f"nothing has moved for {still:.0f} s: {reason}")
        if still > self.config.run.patience_seconds:
            raise Stalled(
                f"nothing has moved for {still:.0f} s (run.patience_seconds): {reason}. Logs are in {self.folder.logs}"
            )
        return True

    def _refuse_failures(self, follower: Follower) -> None:
        """End a run in which every group fails: rollouts come and go, and nothing would ever be trained."""
        limit = self.config.run.max_failed_groups
        for index, name in enumerate(self.config.policies):
            policy = follower.tally.policies[index]
            failed = policy.failed_since(self._started * 1000)
            if limit and failed >= limit:
                raise NothingUsable(
                    f"the last {failed} groups of {name} failed, none was usable (run.max_failed_groups is {limit}). "
                    f"The last one: {policy.last_failure}. Logs are in {self.folder.logs}"
                )

    def _ended(self, outcome: str) -> str:
        self._outcome = outcome
        return outcome

    def _end_parts(self) -> None:
        names = [name for name in self._supervisor.all_names() if name != "broker"]
        killed = self._supervisor.stop(names, grace_seconds=_GRACE_SECONDS)
        if killed:
            self._display.note(f"killed after {_GRACE_SECONDS:g} s: {', '.join(killed)}")

    def _note_session(self) -> None:
        self._memory.stop()
        self.folder.add_session(
            Session(
                started=self._started,
                wall_seconds=round(time.monotonic() - self._began, 3),
                peak_memory_bytes=self._memory.peak_bytes,
                memory_kind=self._memory.kind,
                outcome=self._outcome,
                command=self._command,
            )
        )


class _MetricsLog:
    """``metrics.jsonl``: a line for each step and evaluated version, written anew from the topics at every start."""

    def __init__(self, path: Path, evaluation: EvalConfig) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._evaluation = evaluation

    def take(self, record: Step | EvalResult) -> None:
        """Write a step; evaluations are written together at the end of a session."""
        if isinstance(record, Step):
            plain = to_plain(record)
            del plain["sources"]
            self._write({"kind": "step", **plain})

    def close(self, follower: Follower) -> None:
        """Write the evaluated versions and close the file."""
        for index, policy in sorted(follower.tally.policies.items()):
            for one in policy.evaluations.evaluated(self._evaluation):
                counts = {"samples": one.samples, "failed": one.failed, "other_versions": one.other}
                line = {"kind": "eval", "policy": index, "version": one.version, "accuracy": one.metrics[AVERAGE]}
                self._write({**line, **counts, **one.metrics})
        self._file.close()

    def _write(self, value: dict[str, object]) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()
