"""``headrace doctor``: what this machine, a broker and a store can do, and what to change where they cannot."""

import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json
from headrace.schemas.errors import EXIT_FAILURE, HeadraceError

__all__ = ("app",)

app = command_group("Check this machine, a broker and an object store.")
_FILES, _DISK_BYTES = 4096, 2 << 30
_OPTIONAL = {
    "torch": "training and the transformers engine: pip install 'headrace[train]'",
    "deepspeed": "the DeepSpeed backend: pip install 'headrace[train]'",
    "transformers": "model folders: pip install 'headrace[train]'",
    "boto3": "S3 stores: pip install 'headrace[s3]'",
    "numba": "faster delta coding: pip install 'headrace[fast]'",
}

Finding = tuple[str, str, str]
"""(ok, note or bad; subject; what was found and what to do)"""


@app.command()
def doctor(
    bootstrap: Annotated[str, typer.Option(help="HOST:PORT of a Kafka to try.")] = "",
    store: Annotated[str, typer.Option(help="Store to try: a path, file:///folder or s3://bucket/prefix.")] = "",
    output: Output = Format.text,
) -> None:
    """Print one line for each check. Exit codes: 0 nothing is in the way, 1 something is."""
    findings = [*_machine(), *_packages(), *_broker(bootstrap), *_store(store)]
    if output is Format.json:
        print_json([dict(zip(("state", "subject", "text"), finding, strict=True)) for finding in findings])
    else:
        for state, subject, text in findings:
            sys.stdout.write(f"{state:5} {subject:12} {text}\n")
    if any(state == "bad" for state, _, _ in findings):
        raise typer.Exit(EXIT_FAILURE)


def _machine() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield "ok" if good else "bad", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "ok", "processors", f"{os.cpu_count()} seen"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = files == resource.RLIM_INFINITY or files >= _FILES
    advice = "" if enough else f": the local broker wants {_FILES}; raise it by ulimit -n"
    yield "ok" if enough else "note", "open files", f"limit {files}{advice}"
    free = shutil.disk_usage(".").free
    yield "ok" if free > _DISK_BYTES else "bad", "disk", f"{free / 2**30:.1f} GiB free here"


def _packages() -> Iterator[Finding]:
    for name in ("headrace", "confluent-kafka", "fastavro", "pydantic", "numpy", "zstandard", "xxhash"):
        try:
            yield "ok", name, version(name)
        except PackageNotFoundError:
            yield "bad", name, "is not installed: pip install headrace"
    for name, use in _OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield "note", name, f"is not installed; it is for {use}"
        else:
            yield "ok", name, _version_of(name)


def _version_of(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "installed"


def _broker(bootstrap: str) -> Iterator[Finding]:
    if not bootstrap:
        yield "note", "kafka", "none tried (--bootstrap HOST:PORT); without one a run starts the local broker"
        return
    from headrace.connectors.kafka import Connection
    from headrace.schemas.config import default_kafka

    try:
        connection = Connection.of(default_kafka(), "doctor", bootstrap)
        connection.wait_for_broker(10.0)
        brokers = connection.admin().list_topics(timeout=10).brokers
    except HeadraceError as error:
        yield "bad", "kafka", str(error)
        return
    yield "ok", "kafka", f"{len(brokers)} brokers at {bootstrap}"


def _store(url: str) -> Iterator[Finding]:
    if not url:
        yield "note", "store", "none tried (--store URL); without one a run keeps weights in its folder"
        return
    from headrace.connectors.stores.open import open_store
    from headrace.connectors.stores.probe import probe_create_only

    try:
        result = probe_create_only(open_store(url))
    except (HeadraceError, OSError) as error:
        yield "bad", "store", str(error)
        return
    told = f"{result.writers} racing writers, {result.rounds} rounds: at most {result.most_winners} won"
    yield (
        "ok" if result.create_only else "bad",
        "store",
        f"{url}: {told}"
        + ("" if result.create_only else "; create-only writes do not hold, so two trainers could commit one version"),
    )
