"""How commands find the run that they read: a folder, a run id on a cluster, or the newest run here; and show records.

In: options; out: a connection to the run's topics, with the local broker of a finished run started for the time of
reading. Says on standard error which run it took when none was named.
"""

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.schemas.access import LOOKER
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.connectors.kafka import Connection, RawRecord
    from headrace.schemas.config import KafkaConfig

__all__ = (
    "ClusterOption",
    "FolderOption",
    "RunOption",
    "abbreviated",
    "newest_run",
    "reading",
    "record_lines",
    "topics_of",
    "when",
)

FolderOption = Annotated[str, typer.Option("--folder", "-f", help="Run folder; without it the newest one in runs/.")]
RunOption = Annotated[str, typer.Option("--run", help="Run id on the cluster of --bootstrap, instead of a folder.")]
ClusterOption = Annotated[str, typer.Option("--bootstrap", help="HOST:PORT of the run's Kafka.")]

_MEET_SECONDS = 10.0
"""A cluster has so long to answer a command for the first time."""
_SHOWN = 8
_LONG_TEXT = 400


@contextmanager
def reading(folder: str, run: str, bootstrap: str, *modules: str, role: str = LOOKER) -> Iterator["Connection"]:
    """A connection to a run's topics; ``modules`` are those that the caller is going to import.

    They are loaded while a local broker starts, which takes about as long. ``role`` is the login of who does more than
    look. Raises ConfigurationError when no run can be found, BrokerUnreachable and LoginRefused.
    """
    from headrace.pipeline.launch.folder import RunFolder
    from headrace.pipeline.launch.local_broker import broker_of
    from headrace.schemas.config import default_kafka

    if run and bootstrap:
        yield _connection(default_kafka(), run, bootstrap, role)
        return
    path = Path(folder) if folder else Path("runs") / run if run else newest_run()
    place = RunFolder.existing(path)
    config = place.read_config()

    def load() -> None:
        for module in ("headrace.connectors.kafka", *modules):
            importlib.import_module(module)

    with broker_of(place, bootstrap, load) as address:
        yield _connection(config.kafka, config.run.id, address, role)


def topics_of(connection: "Connection") -> dict[str, int]:
    """Partition counts of the run's topics. Raises MissingTopic when the cluster has none of such a run."""
    from headrace.connectors.kafka_errors import MissingTopic

    topics = connection.list_run_topics()
    if not topics:
        raise MissingTopic(f"the cluster at {connection.bootstrap} has no topic of a run {connection.run}")
    return topics


def _connection(kafka: "KafkaConfig", run: str, bootstrap: str, role: str) -> "Connection":
    from headrace.connectors.kafka import Connection

    connection = Connection.of(kafka, run, bootstrap, role=role)
    connection.wait_for_broker(_MEET_SECONDS)  # what is wrong with an address or a login is said here, and soon
    return connection


def newest_run(parent: Path = Path("runs")) -> Path:
    """The run folder that was made last. Raises ConfigurationError when there is none."""
    found = sorted(parent.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigurationError(f"no run in {parent.absolute()}: name one by --folder, or by --run and --bootstrap")
    sys.stderr.write(f"reading {found[-1].parent}\n")
    return found[-1].parent


def when(timestamp_ms: int) -> str:
    """A time for people, local, to the millisecond."""
    if timestamp_ms < 0:
        return "-"
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(timestamp_ms / 1000))}.{timestamp_ms % 1000:03d}"


def abbreviated(value: Any, full: bool) -> Any:
    """JSON data with long lists of numbers and long texts cut, unless all of it is wanted."""
    if full:
        return value
    if isinstance(value, dict):
        return {name: abbreviated(inner, full) for name, inner in value.items()}
    if isinstance(value, list):
        numbers = bool(value) and all(isinstance(entry, int | float) for entry in value)
        if numbers and len(value) > _SHOWN:
            return f"[{', '.join(_number(entry) for entry in value[:_SHOWN])}, ... {len(value)} in all]"
        return [abbreviated(entry, full) for entry in value]
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        return f"{value[:_LONG_TEXT]}... {len(value)} characters in all"
    return value


def record_lines(raw: "RawRecord", *, full: bool) -> list[str]:
    """A record for people: where it lies, then its fields, empty ones left out."""
    from headrace.schemas.codec import to_plain
    from headrace.schemas.errors import UndecodableRecord

    key = (raw.key or b"").decode("utf-8", "backslashreplace")
    try:
        record = raw.decoded()
    except UndecodableRecord as error:
        return [f"{raw.source}  {when(raw.timestamp_ms)}  key {key}  not decoded: {error}"]
    lines = [f"{raw.source}  {when(raw.timestamp_ms)}  {type(record).__name__}  key {key}"]
    lines += _field_lines(abbreviated(to_plain(record), full), "  ")
    return lines


def _field_lines(fields: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in fields.items():
        if value in ("", [], {}, None) and not name.endswith("_text"):  # an empty completion says something
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if name == "sources":
                places = " ".join(f"{v['topic']}[{v['partition']}]@{v['offset']}" for v in value[:_SHOWN])
                lines.append(f"{indent}{name}: {places}")
                continue
            for number, entry in enumerate(value):
                lines.append(f"{indent}{name}[{number}]")
                lines += _field_lines(entry, indent + "  ")
        elif isinstance(value, dict):
            lines.append(f"{indent}{name}")
            lines += _field_lines(value, indent + "  ")
        else:
            shown = repr(value) if isinstance(value, str) and (not value or "\n" in value) else value
            lines.append(f"{indent}{name}: {shown}")
    return lines


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3g}"
