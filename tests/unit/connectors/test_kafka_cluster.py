"""The state folder of a cluster: what it remembers, refuses and believes; no Java runs here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.connectors import kafka_cluster
from headrace.connectors.kafka_cluster import Cluster, ClusterNotReady, Plan, default_folder
from headrace.connectors.kafka_node import free_port
from headrace.connectors.kafka_properties import Ports
from headrace.schemas.errors import ConfigurationError


class FakeNodes:
    """Stands in for Java: a "node" is a process that sleeps with the settings file on its command line."""

    def __init__(self) -> None:
        self.formatted: list[str] = []
        self.launched: list[subprocess.Popen[bytes]] = []
        self.dying = False

    def format_node(self, java: str, libs: Path, settings: Path, cluster: str, users: Any = ()) -> None:
        self.formatted.append(cluster)
        (settings.parent / "data").mkdir()

    def launch_node(self, java: str, libs: Path, settings: Path, log: Path, heap: str) -> subprocess.Popen[bytes]:
        log.write_text("the node's last words")
        code = "import time; time.sleep(300)"
        process = subprocess.Popen(
            [sys.executable, "-c", "pass" if self.dying else code, str(settings)], start_new_session=True
        )
        self.launched.append(process)
        if self.dying:
            process.wait()
        return process


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNodes]:
    made = FakeNodes()
    monkeypatch.setattr(kafka_cluster, "format_node", made.format_node)
    monkeypatch.setattr(kafka_cluster, "launch_node", made.launch_node)
    wait = Cluster._wait_ready

    def wait_ready(self: Cluster, plan: Plan) -> None:
        if made.dying:
            wait(self, plan)

    monkeypatch.setattr(Cluster, "_wait_ready", wait_ready)
    yield made
    for process in made.launched:
        process.kill()
        process.wait()


def up(cluster: Cluster, plan: Plan) -> list[int]:
    return cluster.up(plan, "java", Path("libs"))


def test_only_what_does_not_run_is_started_and_formatted_once(tmp_path: Path, fake: FakeNodes) -> None:
    cluster, plan = Cluster(tmp_path / "k"), Plan(nodes=3, port=_three_ports())
    assert up(cluster, plan) == [1, 2, 3] and len(set(fake.formatted)) == 1, "nodes of different clusters"
    assert up(cluster, plan) == []
    fake.launched[1].kill()
    fake.launched[1].wait()
    assert [state.pid == 0 for state in cluster.status()] == [False, True, False]
    voters = (cluster.folder / "node-1" / "server.properties").read_text()
    assert up(cluster, plan) == [2] and len(fake.formatted) == 3
    assert (cluster.folder / "node-1" / "server.properties").read_text() == voters, "running nodes know other voters"
    assert cluster.down() == [1, 2, 3]
    assert (cluster.folder / "node-1" / "data").is_dir(), "the data was not kept"
    assert up(cluster, plan) == [1, 2, 3] and len(fake.formatted) == 3
    cluster.down(delete=True)
    assert not cluster.folder.exists()


def test_what_is_not_the_clusters_is_never_deleted_with_it(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "node-1").mkdir()
    Cluster(tmp_path).down(delete=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def _three_ports() -> int:
    return next(p for p in iter(free_port, 0) if all(_free(p + n) for n in range(3)))


def _free(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


def test_a_kill_in_the_middle_of_formatting_is_made_good(
    tmp_path: Path, fake: FakeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, plan = Cluster(tmp_path / "k"), Plan(port=free_port())

    def killed(*arguments: Any) -> None:
        fake.format_node(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(kafka_cluster, "format_node", killed)
    with pytest.raises(KeyboardInterrupt):
        up(cluster, plan)
    monkeypatch.setattr(kafka_cluster, "format_node", fake.format_node)
    assert up(cluster, plan) == [1] and len(fake.formatted) == 2
    cluster.down()


def test_another_plan_and_a_taken_port_are_refused_before_anything_starts(tmp_path: Path, fake: FakeNodes) -> None:
    cluster, plan = Cluster(tmp_path / "k"), Plan(port=free_port())
    up(cluster, plan)
    for other in (Plan(nodes=3, port=plan.port), Plan(port=plan.port + 1), Plan(port=plan.port, secure=True)):
        with pytest.raises(ConfigurationError, match=f"holds a cluster with 1 plain node from port {plan.port}, not"):
            up(cluster, other)
    assert up(cluster, Plan(port=plan.port, users=("a role of the next release",))) == []
    assert cluster.plan() == plan
    cluster.down()
    with socket.create_server(("127.0.0.1", plan.port)), pytest.raises(ConfigurationError, match="is taken") as taken:
        up(cluster, plan)
    if sys.platform == "linux":
        assert f"pid {os.getpid()}" in str(taken.value)
    assert len(fake.launched) == 1


def test_a_stale_pid_is_never_taken_for_a_node_nor_ended(tmp_path: Path, fake: FakeNodes) -> None:
    cluster = Cluster(tmp_path / "k")
    up(cluster, Plan(port=free_port()))
    cluster.down()
    for text in (str(os.getpid()), "0", "-1", "no number", "", "99999999"):
        (cluster.folder / "node-1" / "pid").write_text(text)
        assert cluster.status()[0].pid == 0, text
        assert cluster.down() == []


def test_a_node_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path, fake: FakeNodes) -> None:
    fake.dying = True
    with pytest.raises(ClusterNotReady, match=r"node 1 ended while it started.*\nthe node's last words"):
        up(Cluster(tmp_path / "k"), Plan(port=free_port()))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"plan": {"planets": 9}}', '{"plan": null}'])
def test_a_broken_note_is_named_and_nothing_is_guessed(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"cluster\.json cannot be read.*--folder"):
        Cluster(tmp_path).status()


def test_no_cluster_is_said_and_down_is_no_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no cluster in .*headrace kafka up"):
        Cluster(tmp_path / "none").status()
    assert Cluster(tmp_path / "none").down() == []


def test_logins_name_files_and_hold_no_secret(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    plan = {"nodes": 1, "port": 9092, "secure": True, "users": ["trainer"]}
    cluster._note.write_text(json.dumps({"plan": plan, "controllers": {"1": 19092}}))
    login = cluster.login("trainer")
    assert login["bootstrap"] == "127.0.0.1:9092" and login["security_protocol"] == "SASL_SSL"
    assert login["sasl_password_file"] == str(tmp_path / "secrets" / "trainer.password")
    assert cluster.login("{role}")["sasl_password_file"].endswith("{role}.password")
    assert cluster._controller_port(1) == Ports(9092, 19092).controller


def test_controllers_get_ports_of_their_own_near_the_clients_where_they_are_free() -> None:
    wanted = next(p for p in iter(free_port, 0) if p < 60_000 and _free(p + 1000))
    assert kafka_cluster._port_for_controller(wanted) == wanted + 1000
    with socket.create_server(("127.0.0.1", wanted + 1000)):
        assert kafka_cluster._port_for_controller(wanted) not in (wanted, wanted + 1000)
    assert 0 < kafka_cluster._port_for_controller(65_000) < 1 << 16


def test_the_default_folder_follows_xdg_and_home() -> None:
    assert default_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/headrace/kafka")
    assert default_folder({}) == Path("~/.local/state/headrace/kafka").expanduser()
