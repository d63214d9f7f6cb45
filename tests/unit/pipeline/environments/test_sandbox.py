"""What an untrusted program may not do, done for real: each attack is contained and named."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.pipeline.environments import sandbox as module
from headrace.pipeline.environments import system_calls
from headrace.pipeline.environments.process_tree import tree, usage
from headrace.pipeline.environments.sandbox import Sandbox, SandboxMissing, SandboxOptions, Verdict

OPTIONS = SandboxOptions(wall_seconds=2, memory_mb=128, processes=12, files_mb=8, output_kb=64)
BOXED = shutil.which("bwrap") is not None and not module._problem("/usr/bin/python3", ())
boxed = pytest.mark.skipif(not BOXED, reason="bubblewrap does not work here")


def run(source: str, stdin: str = "", **over: object) -> Verdict:
    return Sandbox(OPTIONS.model_copy(update=over)).run(source, stdin=stdin)


@boxed
def test_a_program_runs_with_its_input_and_files() -> None:
    source = "import sys\nprint(open('data.txt').read().upper(), input(), sys.argv, __name__)"
    made = Sandbox(OPTIONS).run(source, files={"data.txt": b"abc"}, stdin="sonne ☀\n")
    assert made.kind == "ok" and made.isolation == "bubblewrap", made
    assert made.output == "ABC sonne ☀ ['/box/main.py'] __main__\n" and made.errors == "" and str(made) == "ok"


@boxed
def test_a_failure_keeps_its_status_and_its_words() -> None:
    made = run("import sys\nprint('half')\nraise ValueError('no ☃')")
    assert (made.kind, made.status, made.output) == ("error", 1, "half\n") and "ValueError: no ☃" in made.errors
    assert run("import sys; sys.exit(7)").status == 7
    assert run("import os; os.kill(os.getpid(), 11)").kind == "error"


FORKS = """
import os, time
for _ in range(99):
    if os.fork() == 0:
        time.sleep(9)
"""
MEMORY_IN_CHILDREN = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(b"1") * (40 << 20)
        time.sleep(9)
time.sleep(9)
"""
SHARED_MEMORY = """
import mmap, time
maps = [mmap.mmap(-1, 8 << 20) for _ in range(60)]
for m in maps:
    m.write(b"1" * (8 << 20))
time.sleep(9)
"""
DEAF = """
import signal, time
for s in range(1, 32):
    try:
        signal.signal(s, signal.SIG_IGN)
    except OSError:
        pass
time.sleep(99)
"""
FILES = """
for i in range(99):
    with open(f"PLACE{i}", "wb") as f:
        f.write(b"x" * (1 << 20))
"""
THREADS = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()"
MEMORY_FILES = """
import os, time
files = [os.memfd_create("x") for _ in range(60)]
for f in files:
    for _ in range(7):
        os.write(f, b"x" * (1 << 20))
time.sleep(9)
"""
SHARED_SEGMENTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmdt.argtypes = [ctypes.c_void_p]
for _ in range(60):
    segment = libc.shmget(0, 8 << 20, 0o1600)
    if segment < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    held = libc.shmat(segment, None, 0)
    ctypes.memset(held, 1, 8 << 20)
    libc.shmdt(held)
"""
ATTACKS = {
    "fork bomb": ("import os\nwhile True: os.fork()", "processes"),
    "fork bomb that gives up": (FORKS, "processes"),
    "thread bomb": (THREADS, "processes"),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(4 << 20))", "memory"),
    "memory bomb at once": ("x = bytearray(8 << 30)", "memory"),
    "memory in children": (MEMORY_IN_CHILDREN, "memory"),
    "shared memory": (SHARED_MEMORY, "memory"),
    "memory files that nobody maps": (MEMORY_FILES, "memory"),
    "shared segments that nobody maps": (SHARED_SEGMENTS, "memory"),
    "endless loop": ("while True: pass", "timeout"),
    "sleep": ("import time; time.sleep(99)", "timeout"),
    "deaf to signals": (DEAF, "timeout"),
    "huge output": ("while True: print('x' * 1000)", "output"),
    "huge errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "one huge file": ("f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20)); f.flush()", "files"),
    "many files": (FILES.replace("PLACE", "f"), "files"),
    "files in shared memory": (FILES.replace("PLACE", "/dev/shm/f"), "files"),
    "network": ("import socket\nsocket.create_connection(('192.0.2.1', 80), 2)", "network"),
    "name server": ("import socket\nsocket.getaddrinfo('example.org', 80)", "network"),
}


@boxed
@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_is_contained_and_has_its_verdict(name: str) -> None:
    source, kind = ATTACKS[name]
    began = time.monotonic()
    made = run(source)
    assert made.kind == kind, (made, made.errors[-500:])
    assert time.monotonic() - began < OPTIONS.wall_seconds + 3
    assert len(made.output) + len(made.errors) <= 2 * (OPTIONS.output_kb << 10)
    assert not [p for p in tree(os.getpid()) if b"main.py" in _command(p)], "nothing of it lives on"


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@boxed
@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/root", "/home", "/mnt", "/var", "/tmp/secret", "/proc/1/environ", "/sys/kernel"]
)
def test_files_of_the_host_are_not_there(path: str, tmp_path: Path) -> None:
    made = run(f"import os\nprint(os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read())")
    if made.kind == "ok":  # /tmp is the box; its own first process has no environment
        assert made.output.strip("\0\n") in ("", "['main.py']") or "PATH" in made.output
    else:
        assert made.kind == "error" and ("No such file" in made.errors or "Permission denied" in made.errors)
    assert "root:x:0" not in made.output


@boxed
def test_a_secret_of_the_caller_and_its_user_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("API_KEY", "s3cret")
    (tmp_path / "key").write_text("s3cret")
    source = (
        "import os\nprint(os.environ, os.getuid(), os.listdir('/proc/self/fd'))\n"
        f"try: print(open({str(tmp_path / 'key')!r}).read())\nexcept OSError as e: print('none')\n"
        "for p in os.listdir('/proc'):\n    if p.isdigit(): print(open(f'/proc/{p}/cmdline').read())"
    )
    made = run(source)
    assert made.kind == "ok" and "s3cret" not in made.output and "none" in made.output
    assert "pytest" not in made.output, "processes of the host are not seen"
    if os.geteuid() == 0:
        assert f"{module._user()}" in made.output


@boxed
def test_nothing_outside_the_box_can_be_written() -> None:
    places = ["/usr/x", "/x", "/dev/x", "/proc/sys/kernel/hostname", "/etc/x", "/bin/x"]
    source = f"for p in {places!r}:\n    try: open(p, 'w'); print('wrote', p)\n    except OSError: pass"
    made = run(source)
    assert made.kind == "ok" and made.output == ""


@boxed
def test_a_server_on_this_machine_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        made = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2).send(b'hello')")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert made.kind == "error"


@boxed
def test_more_rights_cannot_be_had() -> None:
    source = (
        "import os, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "tried = ('su', 'mount -t tmpfs x /box')\n"
        "print(libc.unshare(0x10000000), [os.system(f'{c} >/dev/null 2>&1') != 0 for c in tried])\n"
        "print(open('/proc/self/status').read())"
    )
    made = run(source)
    assert made.kind == "ok" and "[True, True]" in made.output
    assert "CapEff:\t0000000000000000" in made.output and "NoNewPrivs:\t1" in made.output
    assert made.output.startswith("-1"), "no further user namespace"


@boxed
@pytest.mark.skipif(not system_calls.program(), reason="no filter of system calls is known for this machine")
def test_the_kernel_is_asked_for_nothing_that_leaves_the_box() -> None:
    source = (
        "import ctypes, os, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"numbers = {[n[platform.machine() == 'aarch64'] for n in system_calls._REFUSED.values()]}\n"
        "print([n for n in numbers if libc.syscall(n, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 12, 38)])\n"
        "for family in (40, 17, 38, 1, 2, 10, 16):\n"
        "    kind = socket.SOCK_RAW if family in (16, 17) else socket.SOCK_SEQPACKET if family == 38 else 1\n"
        "    try: socket.socket(family, kind).close(); print(family, 'open')\n"
        "    except OSError as e: print(family, e.errno)"
    )
    made = run(source)
    assert made.kind == "ok", made
    first, *families = made.output.splitlines()
    assert first == "[]"
    assert families == ["40 97", "17 97", "38 97", "1 open", "2 open", "10 open", "16 open"]


@boxed
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give each process a uid of its own")
def test_sandboxes_of_two_processes_do_not_share_their_limits() -> None:
    bomb = "import os, time\nprint('begins', flush=True)\nwhile True: os.fork()"
    code = (
        "import sys, threading, time\nfrom headrace.pipeline.environments import sandbox as s\n"
        f"s._bound_met = lambda *_: 'timeout' if sys.stdin.closed else None\nprint(1, flush=True)\n"
        f"threading.Thread(target=lambda: (sys.stdin.read(), sys.stdin.close())).start()\n"
        f"s.Sandbox(s.SandboxOptions(wall_seconds=60, processes=12)).run({bomb!r})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        time.sleep(0.5)
        made = run("import threading\nfor i in range(4): threading.Thread(target=print, args=(i,)).start()")
        other.stdin.close()
    assert made.kind == "ok", made


@boxed
def test_a_program_may_leave_children_and_they_end_with_it() -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    made = run(f"import subprocess, sys\n{child}\nprint('bye')")
    assert made.kind == "ok" and made.output == "bye\n" and made.seconds < 3
    assert not [p for p in tree(os.getpid()) if b"time.sleep(60)" in _command(p)]


@boxed
def test_programs_leave_nothing_that_counts_against_those_after_them() -> None:
    kinds = [run("print(1)").kind for _ in range(2 * OPTIONS.processes + 8)]
    assert set(kinds) == {"ok"}


@boxed
def test_a_shorter_time_can_be_asked_for() -> None:
    made = Sandbox(OPTIONS).run("while True: pass", wall_seconds=0.5)
    assert made.kind == "timeout" and 0.4 < made.seconds < 2 and str(made).startswith("timeout: exit status")


@boxed
@pytest.mark.parametrize("name", ["a/b", "..", ".", ""])
def test_a_file_name_is_no_path(name: str) -> None:
    with pytest.raises(ValueError, match="no plain file name"):
        Sandbox(OPTIONS).run("", files={name: b""})


def test_without_isolation_nothing_runs_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_problem", lambda python, visible: "bwrap is not installed")
    with pytest.raises(SandboxMissing, match=r"bwrap is not installed\. Install .* allow_unsandboxed = true"):
        Sandbox(OPTIONS)
    bare = Sandbox(OPTIONS.model_copy(update={"allow_unsandboxed": True}))
    source = "import os\nprint(os.getuid(), open('data.txt').read(), os.environ.get('HOME'))"
    made = bare.run(source, files={"data.txt": b"x"})
    assert made.kind == "ok" and made.isolation == "limits"
    assert made.output.split()[0] == str(module._user() if os.geteuid() == 0 else os.getuid())
    assert bare.run("while True: pass", wall_seconds=0.5).kind == "timeout"
    assert bare.run("import os\nwhile True: os.fork()").kind == "processes"
    assert bare.run("x = bytearray(8 << 30)").kind == "memory"
    assert bare.run("while True: print('x' * 1000)").kind == "output"


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda tool, path=None: None if tool == "bwrap" else tool)
    module._problem.cache_clear()
    try:
        assert module._problem("/usr/bin/python3", ()) == "bwrap is not installed"
    finally:
        module._problem.cache_clear()


def test_what_a_process_uses_is_counted_with_its_children() -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9)']); print(1, flush=True)"
    code = f"import subprocess, sys, time\nx = bytearray(30 << 20)\n{child}\ntime.sleep(9)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pids = tree(process.pid)
        used = usage(pids)
        assert len(pids) == 2 and used.tasks >= 2 and used.memory > 30 << 20
        module.end_tree(process.pid)
        assert process.wait() == -9
    assert usage(pids).memory == 0
