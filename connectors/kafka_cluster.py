"""A small cluster of Apache Kafka that outlives the command that started it: up, down, status, over a state folder.

In: jars, Java, a folder. Out: one or three nodes on 127.0.0.1, each known by a pid file and by the settings file on its
command line, so that a stale pid is never ended and never taken for a node. ``up`` starts what does not run and changes
nothing else; ``down`` keeps the data.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.connectors.kafka_node import format_node, free_port, launch_node, new_cluster_id
from headrace.connectors.kafka_properties import ADMIN, MECHANISM, Ports, Security, node_properties
from headrace.connectors.kafka_secrets import ensure_secrets, password_file, salted_users
from headrace.connectors.processes import await_command, command_of, end_processes, holder_of, is_free
from headrace.schemas.errors import ConfigurationError, HeadraceError

__all__ = ("Cluster", "ClusterNotReady", "NodeState", "Plan", "default_folder")

_READY_SECONDS = 180.0
_GRACE_SECONDS = 15.0
_CONTROLLER_DISTANCE = 1000
_TAIL = 1500


class ClusterNotReady(HeadraceError):
    """A node ended, or the cluster did not answer in time; the message has the end of the node's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a cluster is made of; fixed when its folder is first used. Node n listens on ``port + n - 1``."""

    nodes: int = 1
    port: int = 9092
    secure: bool = False
    users: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node as it is now; ``pid`` is 0 when it does not run."""

    number: int
    address: str
    pid: int
    log: str


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_STATE_HOME/headrace/kafka`` or the same in ``~/.local/state``."""
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path("~/.local/state").expanduser()) / "headrace" / "kafka"


class Cluster:
    """The cluster of one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._note = self.folder / "cluster.json"
        self._id = self.folder / "cluster.id"

    # what it is

    def plan(self) -> Plan | None:
        """What this folder's cluster is made of, None when there is none yet. Raises ConfigurationError."""
        note = self._read_note()
        if note is None:
            return None
        plan = dict(note["plan"])
        return Plan(**{**plan, "users": tuple(plan["users"])})

    @property
    def secrets(self) -> Path:
        """Folder of certificate, key and passwords of a secure cluster."""
        return self.folder / "secrets"

    @property
    def certificate(self) -> Path:
        """What clients of a secure cluster trust."""
        return self.secrets / "ca.pem"

    def bootstrap(self) -> str:
        """Addresses of all nodes. Raises ConfigurationError when there is no cluster."""
        return ",".join(state.address for state in self.status())

    def login(self, user: str = ADMIN) -> dict[str, str]:
        """Keys of ``[kafka]`` with which a user of this cluster connects; the password stays in its file."""
        keys = {"bootstrap": self.bootstrap()}
        plan = self.plan()
        if plan is not None and plan.secure:
            keys |= {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": MECHANISM,
                "sasl_username": user,
                "sasl_password_file": str(password_file(self.secrets, user)),
                "ssl_ca_location": str(self.certificate),
            }
        return keys

    def status(self) -> list[NodeState]:
        """Every node with its address and pid. Raises ConfigurationError when no cluster was started here."""
        plan = self.plan()
        if plan is None:
            raise ConfigurationError(f"no cluster in {self.folder}: start one by `headrace kafka up`")
        return [self._state(number, plan) for number in range(1, plan.nodes + 1)]

    # what it does

    def up(self, plan: Plan, java: str, libs: Path, *, heap: str = "512m", test: bool = False) -> list[int]:
        """Start the nodes that do not run, wait until all answer; returns the numbers of those it started.

        Raises ConfigurationError for a plan that differs from the folder's or a port that is taken, ClusterNotReady.
        """
        with self._locked():
            have = self.plan()
            if have is not None and replace(have, users=plan.users) != plan:
                raise ConfigurationError(
                    f"{self.folder} holds a cluster with {_said(have)}, not {_said(plan)}: take it as it is, forget it "
                    "by `headrace kafka down --delete`, or give another --folder"
                )
            plan = have or plan  # users are made when the data is, further ones by `headrace kafka users`
            ports = {n: Ports(plan.port + n - 1, self._controller_port(n)) for n in range(1, plan.nodes + 1)}
            stopped = [n for n in ports if not self._state(n, plan).pid]
            if stopped:
                self._refuse_taken_ports([ports[n].client for n in stopped])
                if len(stopped) == plan.nodes:  # nobody depends on the old ones, which others may have taken since
                    ports = {n: Ports(p.client, _port_for_controller(p.client)) for n, p in ports.items()}
                security, users = self._security(plan, java)
                self._write_note(plan, ports)
                self._start(stopped, ports, java, libs, security, users, heap, test)
            self._wait_ready(plan)
            return stopped

    def down(self, *, delete: bool = False) -> list[int]:
        """End the nodes that run, and with ``delete`` forget their data and secrets; returns the numbers ended."""
        with self._locked():
            running = [state for state in (self.status() if self.plan() else []) if state.pid]
            end_processes([state.pid for state in running], _GRACE_SECONDS)
            for state in running:
                self._pid_file(state.number).unlink(missing_ok=True)
        if delete:
            self._forget()
        return [state.number for state in running]

    # pieces

    def _forget(self) -> None:
        """Remove what belongs to a cluster; the folder goes with it unless it holds something else."""
        for folder in (self.secrets, *self.folder.glob("node-[0-9]*")):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self._note, self._id, self.folder / "lock"):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One `up` or `down` at a time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read_note(self) -> dict[str, Any] | None:
        try:
            note: dict[str, Any] = json.loads(self._note.read_text("utf-8"))
            Plan(**note["plan"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{self._note} cannot be read ({error}); end what runs there and remove the folder, or name another "
                "by --folder"
            ) from error
        return note

    def _write_note(self, plan: Plan, ports: Mapping[int, Ports]) -> None:
        unfinished = self._note.with_suffix(".unfinished")
        controllers = {str(n): p.controller for n, p in ports.items()}
        unfinished.write_text(json.dumps({"plan": asdict(plan), "controllers": controllers}, indent=2) + "\n", "utf-8")
        unfinished.replace(self._note)

    def _controller_port(self, number: int) -> int:
        note = self._read_note() or {}
        return int(note.get("controllers", {}).get(str(number), 0))

    def _node_folder(self, number: int) -> Path:
        return self.folder / f"node-{number}"

    def _pid_file(self, number: int) -> Path:
        return self._node_folder(number) / "pid"

    def _state(self, number: int, plan: Plan) -> NodeState:
        try:
            pid = int(self._pid_file(number).read_text("ascii"))
        except (OSError, ValueError):
            pid = 0
        if pid and str(self._node_folder(number) / "server.properties") not in command_of(pid):
            pid = 0  # stale: the node is gone, and the number may be another program's
        log = str(self._node_folder(number) / "server.out")
        return NodeState(number, f"127.0.0.1:{plan.port + number - 1}", pid, log)

    def _refuse_taken_ports(self, ports: list[int]) -> None:
        for port in ports:
            if not is_free(port):
                holder = holder_of(port)
                raise ConfigurationError(
                    f"port {port} of 127.0.0.1 is taken{f' by {holder}' if holder else ''}: end that, or choose "
                    "another by --port (with several nodes the ports after it are used too)"
                )

    def _security(self, plan: Plan, java: str) -> tuple[Security | None, Mapping[str, str]]:
        if not plan.secure:
            return None, {}
        keytool = Path(java).with_name("keytool")
        return ensure_secrets(self.secrets, plan.users, str(keytool) if keytool.exists() else "keytool")

    def _start(
        self,
        numbers: list[int],
        ports: Mapping[int, Ports],
        java: str,
        libs: Path,
        security: Security | None,
        users: Mapping[str, str],
        heap: str,
        test: bool,
    ) -> None:
        if not self._id.exists():
            self._id.write_text(new_cluster_id(), "ascii")
        for number in numbers:
            place = self._node_folder(number)
            place.mkdir(exist_ok=True)
            settings = place / "server.properties"
            settings.touch(mode=0o600)
            text = node_properties(number, ports, place / "data", security=security, test=test)
            settings.write_text(text, "utf-8")
            if not (place / "formatted").exists():
                shutil.rmtree(place / "data", ignore_errors=True)  # what a kill in the middle of formatting left
                format_node(java, libs, settings, self._id.read_text("ascii"), salted_users(users))
                (place / "formatted").touch()
        for number in numbers:
            place = self._node_folder(number)
            process = launch_node(java, libs, place / "server.properties", place / "server.out", heap)
            await_command(process)
            self._pid_file(number).write_text(str(process.pid), "ascii")

    def _wait_ready(self, plan: Plan) -> None:
        from confluent_kafka import KafkaException

        from headrace.connectors.kafka import Connection
        from headrace.schemas.config import KafkaConfig

        admin = Connection.of(KafkaConfig.model_validate(self.login()), "admin").admin()
        end = time.monotonic() + _READY_SECONDS
        seen = 0
        while time.monotonic() < end:
            for state in self.status():
                if not state.pid:
                    tail = Path(state.log).read_text("utf-8", "replace")[-_TAIL:]
                    raise ClusterNotReady(f"node {state.number} ended while it started: see {state.log}\n{tail}")
            try:
                seen = len(admin.list_topics(timeout=2).brokers)
            except KafkaException:
                seen = 0
            if seen == plan.nodes:
                return
            time.sleep(0.05)
        raise ClusterNotReady(
            f"{seen} of {plan.nodes} nodes answer after {_READY_SECONDS:g} s; see {self.folder}/node-*/server.out"
        )


def _port_for_controller(client: int) -> int:
    """A port far from those that the system hands out for connections, where it can be had."""
    wanted = client + _CONTROLLER_DISTANCE
    return wanted if wanted < 1 << 16 and is_free(wanted) else free_port()


def _said(plan: Plan) -> str:
    kind = "with logins" if plan.secure else "plain"
    return f"{plan.nodes} {kind} node{'s' if plan.nodes > 1 else ''} from port {plan.port}"
