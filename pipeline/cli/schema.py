"""``headrace schema``: the records' schemas in a schema registry; a step of a deployment, never of a producer.

``register`` adds what the registry does not have and fixes the rule of every subject; ``check`` asks whether that would
be allowed, of the registry where one is named, and always of the releases that the package knows.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.schemas.errors import EXIT_FAILURE

if TYPE_CHECKING:
    from headrace.connectors.registry import SchemaRegistry

__all__ = ("app",)

app = command_group("Schemas of the records in a schema registry.")

CaOption = Annotated[str, typer.Option("--ca", help="File with the certificates to trust.")]


@dataclass(frozen=True, slots=True)
class _Row:
    """What is known of one record's schema."""

    record: str
    subject: str
    state: str
    id: int
    detail: str


@app.command()
def register(
    registry: Annotated[
        str, typer.Option(help="Where the registry answers; login by HEADRACE_REGISTRY_USERNAME, _PASSWORD.")
    ],
    ca: CaOption = "",
    output: Output = Format.text,
) -> None:
    """Register every record's schema with the rule BACKWARD_TRANSITIVE. Registering twice changes nothing."""
    server = _registry(registry, ca)
    _print([_registered(server, name) for name in _names()], output)


@app.command()
def check(
    registry: Annotated[str, typer.Option(help="Where the registry answers; without it only releases count.")] = "",
    ca: CaOption = "",
    output: Output = Format.text,
) -> None:
    """Say for every record whether its schema reads what was written before. Exit codes: 0 all do, 1 some do not."""
    if registry:
        server = _registry(registry, ca)
        rows = [_asked(server, name) for name in _names()]
    else:
        rows = [_compared(name) for name in _names()]
    _print(rows, output)
    if any(row.state == "incompatible" for row in rows):
        raise typer.Exit(EXIT_FAILURE)


def _names() -> list[str]:
    from headrace.schemas.records import RECORD_TYPES

    return list(RECORD_TYPES)


def _registry(url: str, ca: str) -> "SchemaRegistry":
    from headrace.connectors.registry import SchemaRegistry
    from headrace.schemas.config import RegistryConfig

    found = SchemaRegistry(RegistryConfig(url=url, ca_location=ca))
    found.probe()
    return found


def _registered(registry: "SchemaRegistry", name: str) -> _Row:
    from headrace.connectors.registry import COMPATIBILITY, subject_of
    from headrace.schemas.avsc import packaged_schema

    subject, schema = subject_of(name), packaged_schema(name)
    before = registry.find(subject, schema)
    number = before.number if before else registry.register(subject, schema)
    if registry.compatibility(subject) != COMPATIBILITY:
        registry.set_compatibility(subject)
    return _Row(name, subject, "present" if before else "registered", number, "")


def _asked(registry: "SchemaRegistry", name: str) -> _Row:
    """What the registry says, and where it has nothing, what the releases say."""
    from headrace.connectors.registry import subject_of
    from headrace.schemas.avsc import packaged_schema

    subject, schema = subject_of(name), packaged_schema(name)
    found = registry.find(subject, schema)
    if found is not None:
        return _Row(name, subject, "present", found.number, "")
    reasons = [*registry.compatible(subject, schema), *_against_releases(name)]
    return _Row(name, subject, "incompatible" if reasons else "absent", 0, "; ".join(reasons))


def _compared(name: str) -> _Row:
    from headrace.connectors.registry import subject_of

    reasons = list(_against_releases(name))
    return _Row(name, subject_of(name), "incompatible" if reasons else "compatible", 0, "; ".join(reasons))


def _against_releases(name: str) -> Iterator[str]:
    from headrace.schemas.avsc import packaged_schema
    from headrace.schemas.released import incompatibilities, released_schemas

    for version, schemas in released_schemas().items():
        if name in schemas:
            for reason in incompatibilities(packaged_schema(name), schemas[name]):
                yield f"release {version}: {reason}"


def _print(rows: list[_Row], output: Format) -> None:
    if output is Format.json:
        print_json([asdict(row) for row in rows])
        return
    print_table(("record", "subject", "state", "id", "detail"), [tuple(asdict(row).values()) for row in rows])
    counts = {state: sum(row.state == state for row in rows) for state in dict.fromkeys(row.state for row in rows)}
    sys.stderr.write(", ".join(f"{count} {state}" for state, count in counts.items()) + "\n")
