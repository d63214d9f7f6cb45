"""Ids of schemas for one run: from its manifest on the cluster, and only for what is missing there from the registry.

The launcher asks the registry once, when the run is created, and writes the ids into the RunManifest; every part takes
them from there. So a registry that goes away later stops nobody, and producers never register anything.
"""

from headrace.connectors.kafka import Connection
from headrace.connectors.registry import RegistryRefused, SchemaRegistry, subject_of
from headrace.schemas.avsc import packaged_schema
from headrace.schemas.codec import fingerprint
from headrace.schemas.config import RegistryConfig
from headrace.schemas.records import RECORD_TYPES, RunManifest

__all__ = ("registered_ids", "take_schema_ids")


def take_schema_ids(connection: Connection, registry: RegistryConfig) -> None:
    """Give ``connection`` the ids of all packaged schemas; does nothing without a registry.

    Waits for a broker. Raises RegistryUnreachable, RegistryRefused for a schema that is not registered.
    """
    if not registry.url:
        return
    connection.wait_for_broker()
    ids = _ids_of_run(connection)
    missing = [name for name in RECORD_TYPES if fingerprint(name) not in ids]
    if missing:
        ids |= registered_ids(SchemaRegistry(registry), missing)
    connection.use_schema_ids(ids)


def registered_ids(registry: SchemaRegistry, names: list[str]) -> dict[str, int]:
    """Fingerprint -> id of the packaged schemas of these records. Raises RegistryRefused for one that has none."""
    registry.probe()
    found = {name: registry.find(subject_of(name), packaged_schema(name)) for name in names}
    absent = [name for name, registered in found.items() if registered is None]
    if absent:
        raise RegistryRefused(
            f"the registry at {registry.config.url} does not have the schemas of {', '.join(absent)} as this release "
            f"writes them; register them once by: headrace schema register --registry {registry.config.url}"
        )
    return {fingerprint(name): registered.number for name, registered in found.items() if registered is not None}


def _ids_of_run(connection: Connection) -> dict[str, int]:
    """The ids in the newest manifest of the run; empty before it is created."""
    ids: dict[str, int] = {}
    if "run" in connection.list_run_topics():
        for raw in connection.read_topic("run"):
            record = raw.decoded_if_ours()
            if isinstance(record, RunManifest):
                ids = dict(record.schema_ids)
    return ids
