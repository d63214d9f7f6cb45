"""Find what Apache Kafka needs on a machine without a container engine: Java 17 and a folder of jars.

In: a folder that was named, the environment, the user's cache. Out: the folder, filled by Maven once when nothing was
named. Guarantees that a half-finished download is never taken for a whole one.
"""

import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

from headrace.schemas.errors import ConfigurationError

__all__ = ("KAFKA_VERSION", "LIBS_VARIABLE", "cached_libs", "find_java", "find_libs", "main_class")

LIBS_VARIABLE = "HEADRACE_KAFKA_LIBS"
"""Environment variable that names the ``libs`` folder of an unpacked Kafka."""
KAFKA_VERSION = "4.3.1"
"""The release that the packaged pom fetches."""
_JAVA_AT_LEAST = 17
_MAVEN_SECONDS = 900
_HOW = (
    f"name the `libs` folder of an unpacked Apache Kafka 4 by --libs or {LIBS_VARIABLE}, or install Maven (`mvn`), "
    "which fetches about 54 MB"
)


def find_java(environment: Mapping[str, str] = os.environ) -> str:
    """The path of a Java of release 17 or newer: JAVA, JAVA_HOME, then the PATH. Raises ConfigurationError."""
    home = environment.get("JAVA_HOME")
    java = environment.get("JAVA") or (f"{home}/bin/java" if home else None)
    java = java or shutil.which("java", path=environment.get("PATH"))
    if java is None:
        raise ConfigurationError(
            "Apache Kafka needs Java 17: no `java` on the path and no JAVA in the environment; install a JRE "
            "(Debian: openjdk-17-jre-headless), or use the local broker, which needs none"
        )
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    except OSError as error:
        raise ConfigurationError(f"{java} is no Java that can be run: {error.strerror}; set JAVA to one") from error
    release = re.search(r'version "(\d+)', said)
    if release is None or int(release[1]) < _JAVA_AT_LEAST:
        raise ConfigurationError(
            f"Apache Kafka 4 needs Java {_JAVA_AT_LEAST} or newer, and {java} says {said.strip().splitlines()[:1]}; "
            "set JAVA to a newer one"
        )
    return java


def find_libs(
    given: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """The folder of Kafka's jars: ``given``, else HEADRACE_KAFKA_LIBS, else the cache, which Maven fills when empty.

    ``say`` takes a line before the download. Raises ConfigurationError that says what can be done.
    """
    named = given or (Path(environment[LIBS_VARIABLE]) if environment.get(LIBS_VARIABLE) else None)
    if named is not None:
        if not any(named.glob("kafka*.jar")):
            raise ConfigurationError(f"{named} holds no jars of Apache Kafka; {_HOW}")
        return named
    cache = cached_libs(environment)
    if not cache.is_dir():
        _fetch(cache, environment, say)
    return cache


def cached_libs(environment: Mapping[str, str] = os.environ) -> Path:
    """Where fetched jars are kept: ``$XDG_CACHE_HOME/headrace/kafka-<release>`` or the same in ``~/.cache``."""
    base = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".cache")
    return Path(base) / "headrace" / f"kafka-{KAFKA_VERSION}"


def _fetch(cache: Path, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Let Maven copy the jars beside the cache and move them into place whole."""
    maven = shutil.which("mvn", path=environment.get("PATH"))
    if maven is None:
        raise ConfigurationError(f"no jars of Apache Kafka here and no Maven to fetch them; {_HOW}")
    say(f"fetching Apache Kafka {KAFKA_VERSION} by Maven into {cache}")
    unfinished = cache.with_name(f"{cache.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        with resources.as_file(resources.files("headrace.connectors") / "kafka_pom.xml") as pom:
            shutil.copyfile(pom, unfinished / "pom.xml")  # Maven takes pom.xml by name and writes beside nothing else
        done = subprocess.run(
            [maven, "-B", "-q", "-f", "pom.xml", "dependency:copy-dependencies", "-DoutputDirectory=libs"],
            cwd=unfinished, env=dict(environment), capture_output=True, text=True, timeout=_MAVEN_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            wrong = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line][:3]
            raise ConfigurationError(f"Maven could not fetch Apache Kafka: {' '.join(wrong)[:900]}; {_HOW}")
        try:
            (unfinished / "libs").rename(cache)
        except OSError:  # another process was first
            if not cache.is_dir():
                raise
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"Maven did not fetch Apache Kafka within {_MAVEN_SECONDS} s; {_HOW}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def main_class(libs: Path, names: tuple[str, ...]) -> str:
    """The first of these classes that the jars have; Kafka moves them between versions. Raises ConfigurationError."""
    have: set[str] = set()
    for jar in libs.glob("kafka*.jar"):
        with zipfile.ZipFile(jar) as archive:
            have.update(archive.namelist())
    for name in names:
        if name.replace(".", "/") + ".class" in have:
            return name
    raise ConfigurationError(f"{libs} is not the `libs` folder of Apache Kafka 4: none of {', '.join(names)} in it")
