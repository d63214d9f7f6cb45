"""Runs a program that nobody trusts: no network, no file of the host, and bounds on all that it can use up.

Goes in: source text, files and standard input; comes out: a Verdict, always within the wall-clock limit. Four layers:
another user (a uid that no other process has, where this process is root), resource limits, bubblewrap's namespaces
with an empty file system but for ``/usr`` and a filter of system calls, and a watch that kills what passes its memory,
processes or output.
"""

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.pipeline.environments import system_calls
from headrace.pipeline.environments.process_tree import children, end_tree, tree, usage
from headrace.schemas.errors import ConfigurationError

__all__ = ("VERDICTS", "Sandbox", "SandboxMissing", "SandboxOptions", "Verdict")

VERDICTS = ("ok", "error", "timeout", "memory", "processes", "output", "files", "network")
"""What a run ends as; all but ``ok`` and ``error`` name the bound that it met."""

Kind = Literal["ok", "error", "timeout", "memory", "processes", "output", "files", "network"]

_BOX = "/box"
_BETWEEN_LOOKS = 0.02
_ENDING_SECONDS = 2.0
"""Longest wait for what was killed to be gone."""
_OWN_UIDS = 1_800_000_000
"""Uids from here on, by the pid of the caller: RLIMIT_NPROC counts by uid, so sandboxes must not share one."""
_NOBODY = 65534
_SAID: tuple[tuple[str, Kind], ...] = (
    ("MemoryError", "memory"),
    ("Cannot allocate memory", "memory"),
    ("Resource temporarily unavailable", "processes"),
    ("can't start new thread", "processes"),
    ("No space left on device", "files"),
    ("File too large", "files"),
    ("Network is unreachable", "network"),
    ("Temporary failure in name resolution", "network"),
)
"""Words of a program that failed at a bound by itself. They choose the label of a failure and nothing else."""


class SandboxMissing(ConfigurationError):
    """bubblewrap or prlimit is not there or may not work here, and nobody allowed to run without."""


class SandboxOptions(BaseModel):
    """Bounds of one run; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wall_seconds: float = Field(10.0, gt=0)
    """Time from start to end; also the bound on each process's CPU time."""
    memory_mb: int = Field(512, ge=16)
    """Memory of all processes together, and address space of each twice that."""
    processes: int = Field(32, ge=1)
    """Processes and threads at one time."""
    files_mb: int = Field(32, ge=1)
    """What may be written in files, all together."""
    output_kb: int = Field(256, ge=1)
    """Standard output and error together; what is beyond ends the run."""
    python: str = "/usr/bin/python3"
    """The interpreter inside; it must lie in a folder that is visible there."""
    visible: list[str] = Field(default_factory=list)
    """Further folders of the host that programs may read."""
    allow_unsandboxed: bool = False
    """Run with another user and limits only where bubblewrap does not work: network and host files are then open."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run ended. ``status``: exit status, 128 + N for signal N. ``isolation``: bubblewrap, or limits only."""

    kind: Kind
    status: int
    output: str
    errors: str
    seconds: float
    isolation: Literal["bubblewrap", "limits"]

    def __str__(self) -> str:
        return self.kind if self.kind == "ok" else f"{self.kind}: exit status {self.status} after {self.seconds:.2f} s"


class Sandbox:
    """Runs one program at a time. Raises SandboxMissing when it cannot isolate and may not run without."""

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        self._problem = _problem(self.options.python, tuple(self.options.visible))
        if self._problem and not self.options.allow_unsandboxed:
            raise SandboxMissing(
                f"programs cannot be isolated here: {self._problem}. Install bubblewrap and util-linux (a container "
                "needs leave to make user namespaces), or set allow_unsandboxed = true where every program may be "
                "trusted with this machine's network and files"
            )

    def run(
        self,
        source: str,
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: str = "",
        wall_seconds: float | None = None,
    ) -> Verdict:
        """Run Python source. files: name to content, in the working folder. wall_seconds: under the option's bound.

        Raises ValueError for a file name with a slash.
        """
        every = {**(files or {}), "main.py": source.encode("utf-8", "surrogatepass")}
        for name in every:
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"{name!r} is no plain file name")
        wall = min(self.options.wall_seconds, wall_seconds or self.options.wall_seconds)
        with contextlib.ExitStack() as stack:
            given = stack.enter_context(_held(stdin.encode("utf-8", "surrogatepass")))
            if self._problem:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-"))
                return self._watched(self._bare(every, Path(folder)), given, (), Path(folder), wall)
            held = {name: stack.enter_context(_held(content)) for name, content in every.items()}
            calls = stack.enter_context(_held(system_calls.program()))
            return self._watched(self._boxed(held, calls), given, (*held.values(), calls), None, wall)

    def _boxed(self, files: Mapping[str, int], calls: int) -> list[str]:
        options = self.options
        command = [*_limits(options), *_bubblewrap(tuple(options.visible), calls)]
        command += ["--size", str(options.files_mb << 20), "--tmpfs", _BOX]
        for name, number in files.items():
            command += ["--file", str(number), f"{_BOX}/{name}"]
        return [*command, *_SEALED, "--chdir", _BOX, "--", options.python, "-I", "-B", f"{_BOX}/main.py"]

    def _bare(self, files: Mapping[str, bytes], folder: Path) -> list[str]:
        user = _user()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if user is not None:
            for path in (folder, *folder.iterdir()):
                os.chown(path, user, user)
        return [*_limits(self.options), self.options.python, "-I", "-B", str(folder / "main.py")]

    def _watched(
        self, command: list[str], stdin: int, held: tuple[int, ...], folder: Path | None, wall: float
    ) -> Verdict:
        user = _user()
        drop: dict[str, object] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        began = time.monotonic()
        with _ORPHANS:
            _reap_orphans()
            process: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder or "/",
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                pass_fds=held,
                start_new_session=True,
                **drop,
            )
            _RUNNING.add(process.pid)
        try:
            met, output, errors = _watch(process, self.options, began + wall)
        finally:
            _end(process)
            _forget(process.pid)
        seconds = time.monotonic() - began
        status = process.returncode if process.returncode >= 0 else 128 - process.returncode
        kind: Kind = met if met and met != "timeout" else _kind_of(status, errors, timed_out=met is not None)
        isolation: Literal["bubblewrap", "limits"] = "limits" if self._problem else "bubblewrap"
        return Verdict(kind, status, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace"), seconds,
                       isolation)  # fmt: skip


_SEALED = ("--remount-ro", "/dev", "--remount-ro", "/")
"""The folders that bubblewrap makes lie in memory without a bound: nothing may be written there."""


def _bubblewrap(visible: Sequence[str], calls: int) -> list[str]:
    """calls: a file with the filter of system calls; one that is empty is none."""
    command = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if _knows_disable_userns():
        command.append("--disable-userns")
    if os.fstat(calls).st_size:
        command += ["--seccomp", str(calls)]
    command += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", _BOX, "--setenv", "LANG"]
    command += ["C.UTF-8", "--setenv", "TMPDIR", _BOX, "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for link in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        path = Path(link)
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), link]
        elif path.is_dir():
            command += ["--ro-bind", link, link]
    for folder in visible:
        command += ["--ro-bind", folder, folder]
    return [*command, "--size", str(16 << 20), "--tmpfs", "/dev/shm", "--symlink", _BOX, "/tmp"]


def _limits(options: SandboxOptions) -> list[str]:
    own = 0 if _user() is not None else _tasks_of_user()
    cpu = int(options.wall_seconds) + 1
    return [
        "prlimit",
        f"--cpu={cpu}:{cpu + 1}",
        f"--as={options.memory_mb << 21}",
        f"--fsize={options.files_mb << 20}",
        f"--nproc={own + options.processes + 4}",
        "--nofile=256",
        "--core=0",
        "--",
    ]


@cache
def _knows_disable_userns() -> bool:
    told = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False)
    return "--disable-userns" in told.stdout + told.stderr


@cache
def _problem(python: str, visible: tuple[str, ...]) -> str:
    """Why programs cannot be isolated here; empty when a trial worked."""
    for tool in ("prlimit", "bwrap"):
        if shutil.which(tool, path="/usr/bin:/bin:/usr/local/bin") is None:
            return f"{tool} is not installed"
    user = _user()
    drop: dict[str, object] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    with _held(system_calls.program()) as calls:
        trial = subprocess.run(  # type: ignore[call-overload]
            [*_bubblewrap(visible, calls), "--tmpfs", _BOX, *_SEALED, "--", python, "-I", "-c", "print(1)"],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            timeout=30,
            pass_fds=(calls,),
            **drop,
        )
    return "" if trial.stdout.strip() == "1" else f"a trial failed: {trial.stderr.strip()[-300:] or trial.returncode}"


_ORPHANS = threading.Lock()
_RUNNING: set[int] = set()
"""First processes of runs, which are waited for by their own."""
_SET_CHILD_SUBREAPER = 36


@cache
def _adopts_orphans() -> bool:
    """Whether orphans of this process fall to it (prctl(2)), from now on."""
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def _reap_orphans() -> bool:
    """Take the status of first processes of namespaces, which bubblewrap leaves to whoever adopts orphans.

    Until then they count towards the process limit of their user; init takes its time, and in containers may be none.
    Says whether none is left; one that is left is ending, with all in its namespace.
    """
    left = 0
    for pid in children(os.getpid()) if _adopts_orphans() else ():
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
            if name == "bwrap" and pid not in _RUNNING:
                left += os.waitpid(pid, os.WNOHANG)[0] == 0
    return left == 0


def _forget(pid: int) -> None:
    """A run's first process has ended: wait until its namespace has too."""
    end = time.monotonic() + _ENDING_SECONDS
    with _ORPHANS:
        _RUNNING.discard(pid)
        ended = _reap_orphans()
    while not ended and time.monotonic() < end:
        time.sleep(_BETWEEN_LOOKS / 4)
        with _ORPHANS:
            ended = _reap_orphans()


def _user() -> int | None:
    """A uid of the caller's own to drop to; None when this process may not change its user."""
    if os.geteuid() != 0:
        return None
    wanted = _OWN_UIDS + os.getpid()
    rows = [line.split() for line in Path("/proc/self/uid_map").read_text("ascii").splitlines()]
    mapped = any(int(start) <= wanted < int(start) + int(count) for start, _, count in rows)
    return wanted if mapped else _NOBODY


def _tasks_of_user() -> int:
    """Tasks that this user runs already: without another uid they count towards the limit."""
    count, own = 0, os.getuid()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == own:
                count += sum(1 for _ in (process / "task").iterdir())
    return count


@contextlib.contextmanager
def _held(content: bytes) -> Iterator[int]:
    """A file without a name that holds ``content``, as its number, at its begin."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        yield file.fileno()


def _watch(process: "subprocess.Popen[bytes]", options: SandboxOptions, end: float) -> tuple[Kind | None, bytes, bytes]:
    """Read what it writes until it ends or meets a bound; the bound, standard output and error so far."""
    assert process.stdout is not None and process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    output, errors = kept.values()
    most = options.output_kb << 10
    met: Kind | None = None
    ended = False
    with selectors.DefaultSelector() as selector:
        for number in kept:
            selector.register(number, selectors.EVENT_READ)
        while met is None and not ended:
            # what it wrote before its end is in the pipes when its end is seen
            ended = process.poll() is not None
            while ready := selector.select(0 if ended else _BETWEEN_LOOKS):
                for key, _ in ready:
                    if data := os.read(key.fd, 1 << 16):
                        kept[key.fd] += data
                    else:
                        selector.unregister(key.fd)
                if not ended or len(output) + len(errors) > most or not selector.get_map():
                    break
            if not ended and not selector.get_map():
                time.sleep(_BETWEEN_LOOKS)
            if len(output) + len(errors) > most:
                met = "output"
            elif not ended:
                met = _bound_met(process.pid, options, end)
    return met, bytes(output[:most]), bytes(errors[:most])


def _bound_met(pid: int, options: SandboxOptions, end: float) -> Kind | None:
    if time.monotonic() >= end:
        return "timeout"
    used = usage(tree(pid))
    if used.memory > options.memory_mb << 20:
        return "memory"
    return "processes" if used.tasks > options.processes + 2 else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left: with its first process a pid namespace ends whole, and without one the tree is walked."""
    if process.poll() is None:
        end_tree(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _kind_of(status: int, errors: bytes, *, timed_out: bool) -> Kind:
    if status == 0 and not timed_out:
        return "ok"
    if status == 128 + signal.SIGXFSZ:
        return "files"
    said = errors.decode("utf-8", "replace")[-2000:]
    found = next((kind for words, kind in _SAID if words in said), None)
    if found is None and (timed_out or status in (128 + signal.SIGXCPU, 128 + signal.SIGKILL)):
        return "timeout"
    return found or "error"
