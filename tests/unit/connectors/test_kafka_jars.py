"""Java and jars: found where they are named, fetched once, and every lack said with what to do."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import pytest

from headrace.connectors.kafka_jars import KAFKA_VERSION, cached_libs, find_java, find_libs, main_class
from headrace.schemas.errors import ConfigurationError


def program(path: Path, text: str) -> Path:
    """A shell script that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def java_of(path: Path, release: str) -> Path:
    return program(path, f"echo 'openjdk version \"{release}\" 2025-01-01' >&2")


def test_java_is_taken_from_java_then_its_home_then_the_path(tmp_path: Path) -> None:
    named, home = java_of(tmp_path / "named", "21.0.1"), java_of(tmp_path / "home/bin/java", "17.0.15")
    found = java_of(tmp_path / "path/java", "25")
    environment = {"JAVA": str(named), "JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}
    assert find_java(environment) == str(named)
    del environment["JAVA"]
    assert find_java(environment) == str(home)
    del environment["JAVA_HOME"]
    assert find_java(environment) == str(found)


@pytest.mark.parametrize("release", ["11.0.20", "1.8.0_392", "16.0.2"])
def test_an_old_java_is_refused_with_its_release(tmp_path: Path, release: str) -> None:
    old = java_of(tmp_path / "java", release)
    with pytest.raises(ConfigurationError, match=f"needs Java 17 or newer.*{release}"):
        find_java({"JAVA": str(old)})


def test_no_java_or_one_that_cannot_be_run_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="install a JRE"):
        find_java({"PATH": str(tmp_path)})
    with pytest.raises(ConfigurationError, match="set JAVA to one"):
        find_java({"JAVA": str(tmp_path / "gone")})
    silent = program(tmp_path / "silent", "true")
    with pytest.raises(ConfigurationError, match="needs Java 17"):
        find_java({"JAVA": str(silent)})


def test_named_folders_win_and_must_hold_kafka(tmp_path: Path) -> None:
    good = tmp_path / "libs"
    good.mkdir()
    (good / "kafka_2.13-4.3.1.jar").touch()
    assert find_libs(good, {}) == good
    assert find_libs(None, {"HEADRACE_KAFKA_LIBS": str(good)}) == good
    with pytest.raises(ConfigurationError, match="holds no jars of Apache Kafka; name the `libs` folder"):
        find_libs(tmp_path, {"HEADRACE_KAFKA_LIBS": str(good)})


def environment_with_maven(tmp_path: Path, script: str) -> dict[str, str]:
    program(tmp_path / "bin/mvn", script)
    return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_maven_fills_the_cache_once_with_the_packaged_pom(tmp_path: Path) -> None:
    script = f"echo run >> {tmp_path}/runs; grep -q kafka_2.13 pom.xml && mkdir libs && touch libs/kafka_2.13.jar"
    environment, said = environment_with_maven(tmp_path, script), []
    for _ in range(2):
        libs = find_libs(None, environment, said.append)
        assert libs == cached_libs(environment) == tmp_path / "cache/headrace" / f"kafka-{KAFKA_VERSION}"
        assert [file.name for file in libs.iterdir()] == ["kafka_2.13.jar"]
    assert (tmp_path / "runs").read_text() == "run\n"
    assert len(said) == 1 and KAFKA_VERSION in said[0]
    assert [entry.name for entry in libs.parent.iterdir()] == [libs.name], "something unfinished was left"


def test_a_maven_that_fails_leaves_no_half_cache_and_its_reason(tmp_path: Path) -> None:
    script = "mkdir libs; touch libs/kafka_1.jar; echo '[ERROR] Unknown host repo: Name or service not known'; exit 1"
    environment = environment_with_maven(tmp_path, script)
    with pytest.raises(ConfigurationError, match=r"Unknown host repo.*--libs or HEADRACE_KAFKA_LIBS"):
        find_libs(None, environment)
    assert not cached_libs(environment).exists()
    assert list(cached_libs(environment).parent.iterdir()) == []


def test_without_maven_it_says_both_ways(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no Maven to fetch them.*--libs.*install Maven"):
        find_libs(None, {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})


def test_the_cache_follows_xdg_or_home() -> None:
    assert cached_libs({"HOME": "/home/a"}) == Path(f"/home/a/.cache/headrace/kafka-{KAFKA_VERSION}")
    assert cached_libs({"HOME": "/home/a", "XDG_CACHE_HOME": "/c"}) == Path(f"/c/headrace/kafka-{KAFKA_VERSION}")


def test_the_first_class_that_the_jars_have_is_taken(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "kafka-core.jar", "w") as jar:
        jar.writestr("org/apache/kafka/tools/StorageTool.class", b"")
    assert main_class(tmp_path, ("kafka.tools.StorageTool", "org.apache.kafka.tools.StorageTool")).startswith("org.")
    with pytest.raises(ConfigurationError, match=r"none of kafka\.Kafka"):
        main_class(tmp_path, ("kafka.Kafka",))
