"""The servers in infra/ are pinned, bounded, watched and reachable from this machine only."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

INFRA = Path(__file__).resolve().parents[2] / "infra"
COMPOSE: dict[str, Any] = yaml.safe_load((INFRA / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = sorted(set(SERVICES) - {"bucket"})  # bucket runs once and ends


def image_of(service: dict[str, Any]) -> str:
    """The image with a default in place of a variable: ${NAME:-image} gives image."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["image"])


def test_profiles_start_what_they_say() -> None:
    members = {
        profile: sorted(name for name, service in SERVICES.items() if profile in service["profiles"])
        for profile in ("core", "ui", "metrics")
    }
    assert members == {
        "core": ["bucket", "kafka", "objects", "registry"],
        "ui": ["kafka", "kafka-ui", "registry"],
        "metrics": ["grafana", "prometheus"],
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
    assert image_of(SERVICES["kafka"]) == f"apache/kafka:{version}"
    artifacts = {element.text for element in pom.iterfind("m:dependencies/m:dependency/m:artifactId", space)}
    assert {"kafka_2.13", "kafka-tools", "slf4j-simple", "log4j-core"} <= artifacts


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
    (target,) = {t for job in yaml.safe_load((INFRA / "prometheus/prometheus.yml").read_text())["scrape_configs"]
                 for static in job["static_configs"] for t in static["targets"]}  # fmt: skip
    port = target.rpartition(":")[2]
    assert f"HEADRACE_METRICS_PORT={port}" in (INFRA / "prometheus/prometheus.yml").read_text(encoding="utf-8")
