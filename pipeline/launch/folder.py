"""The run folder: what lies where, and what a launcher notes about its sessions (wall time, peak memory).

In: a folder or a configuration; out: paths. A folder is a run's if it has ``config.json``; the run can be read,
verified and resumed from it alone.
"""

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.schemas.config import RunConfig, read_config
from headrace.schemas.errors import ConfigurationError

__all__ = ("RunFolder", "Session")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One launcher's part of a run: seconds (since the epoch for ``started``), bytes summed over processes."""

    started: float
    wall_seconds: float
    peak_memory_bytes: int
    memory_kind: str
    outcome: str
    command: str


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @classmethod
    def of(cls, config: RunConfig) -> "RunFolder":
        """The folder that a configuration names."""
        return cls(config.run_folder())

    @classmethod
    def existing(cls, path: str | Path) -> "RunFolder":
        """The folder of a run that was started. Raises ConfigurationError when it is none."""
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise ConfigurationError(f"{path} is no run folder: {folder.config} does not exist")
        return folder

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line for every step and every evaluated version."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Standard output and error of every part, ``PART.log``."""
        return self.path / "logs"

    @property
    def broker(self) -> Path:
        """Data of the local broker."""
        return self.path / "broker"

    @property
    def report_json(self) -> Path:
        """The figures of the run."""
        return self.path / "report.json"

    @property
    def report_html(self) -> Path:
        """The same for people, one file."""
        return self.path / "report.html"

    @property
    def best(self) -> Path:
        """The version of every policy that was evaluated best, as model folders."""
        return self.path / "best"

    @property
    def training(self) -> Path:
        """What a training from the log (``headrace train``) trains; other runs have none."""
        return self.path / "from_batches.json"

    @property
    def sessions_file(self) -> Path:
        """What each launcher of this run noted at its end."""
        return self.path / "sessions.json"

    def read_config(self) -> RunConfig:
        """The run's configuration with ``run.folder`` set to where the folder lies. Raises ConfigurationError."""
        config = read_config(self.config)
        place = str(self.path.absolute().parent)
        if self.path.absolute().name != config.run.id:
            raise ConfigurationError(f"{self.path} holds run {config.run.id}: name the folder {config.run.id} again")
        return config.model_copy(update={"run": config.run.model_copy(update={"folder": place})})

    def create(self) -> None:
        """Make the folder with what a run writes into it; existing folders stay."""
        for name in ("", "logs", "store", "broker", "checkpoints", "model"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def sessions(self) -> list[Session]:
        """Sessions that have ended, oldest first."""
        if not self.sessions_file.exists():
            return []
        return [Session(**entry) for entry in json.loads(self.sessions_file.read_text("utf-8"))]

    def add_session(self, session: Session) -> None:
        """Note a session at its end; a kill leaves the old notes or the new ones."""
        entries = [asdict(entry) for entry in (*self.sessions(), session)]
        self.write_whole(self.sessions_file, json.dumps(entries, indent=2) + "\n")

    def write_whole(self, path: Path, text: str) -> None:
        """Write a file of the folder in one piece: a full disk or a kill leaves the one that was there."""
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(text, "utf-8")
        unfinished.replace(path)

    def lock(self) -> int:
        """Hold the folder for this process, however it ends; returns the descriptor that holds it.

        Raises ConfigurationError when another launcher has it.
        """
        descriptor = os.open(self.path / "launcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise ConfigurationError(
                f"the run in {self.path} is running (launcher: process {holder}); stop that one before you go on"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor
