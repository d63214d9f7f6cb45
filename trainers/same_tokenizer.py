"""Refuses a model whose tokenizer is not the one that a run was created with: its token ids would mean other text."""

from headrace.connectors.kafka import Connection
from headrace.connectors.model_folder import tokenizer_digest
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import RunManifest

__all__ = ("check_tokenizer",)


def check_tokenizer(connection: Connection, folder: str) -> None:
    """Compare the model in ``folder`` with the manifest of the connection's run, where there is one.

    Raises ConfigurationError.
    """
    manifest = None
    for raw in connection.read_topic("run"):
        record = raw.decoded_if_ours()
        if isinstance(record, RunManifest):
            manifest = record
    if manifest is None or not manifest.tokenizer_digest:
        return
    found = tokenizer_digest(folder)
    if found != manifest.tokenizer_digest:
        raise ConfigurationError(
            f"the tokenizer in {folder} is not the one that run {connection.run} was created with (digest "
            f"{found[:12]}, {manifest.tokenizer_digest[:12]} wanted): token ids would mean other text"
        )
