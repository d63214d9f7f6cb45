"""Puts a dead letter back where it came from, for the stage to try again.

In: a connection and the offset of a letter; out: the place of the new record. The record has its own key, headers and
bytes (or mended ones) and says by the header ``hr-requeued`` which letter it was, so that a second try is noticed.
"""

from headrace.connectors.kafka import Connection, RawRecord
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.ids import unprefixed
from headrace.schemas.parts import Source

__all__ = ("requeue",)

HEADER = "hr-requeued"
_ERRORS = "__streams.errors."
_LETTER_HEADERS = ("hr-stage", "hr-size", "hr-sha256", "hr-key-size")
_SECONDS = 30.0


def requeue(connection: Connection, offset: int, *, value: bytes | None = None, again: bool = False) -> Source:
    """Write the letter at ``offset`` to its topic and partition again; ``value`` replaces its bytes.

    Raises ConfigurationError for a letter that does not exist, that has no place to go back to, whose bytes were cut
    and are not given, or that was put back before (unless ``again``).
    """
    letter = next((r for r in connection.read_topic("dead-letters", {0: offset}) if r.offset == offset), None)
    if letter is None:
        raise ConfigurationError(f"dead-letters[0]@{offset} does not exist: headrace dead-letters list shows them")
    headers = dict(letter.headers)
    topic = unprefixed(connection.run, (headers.get(f"{_ERRORS}topic") or b"").decode("utf-8", "replace"))
    number = (headers.get(f"{_ERRORS}partition") or b"").decode("ascii", "replace")
    partition = int(number) if number.isdecimal() else -1
    if not 0 <= partition < connection.list_run_topics().get(topic, 0):
        raise ConfigurationError(
            f"dead-letters[0]@{offset} came from no topic of run {connection.run} ({topic or 'no topic'}[{number}]): "
            "it was refused before it was written, or is none of ours, so there is no place to put it back to"
        )
    if value is None and "hr-size" in headers:
        raise ConfigurationError(
            f"dead-letters[0]@{offset} holds only the first {len(letter.value or b'')} of "
            f"{(headers['hr-size'] or b'?').decode()} bytes: give all of them by --value FILE"
        )
    if "hr-key-size" in headers:
        raise ConfigurationError(
            f"dead-letters[0]@{offset} holds only the first {len(letter.key or b'')} of "
            f"{(headers['hr-key-size'] or b'?').decode()} bytes of its key: no stage writes such a key, so its writer "
            "has to send the record anew"
        )
    before = None if again else _put_back(connection, letter, topic, partition)
    if before is not None:
        raise ConfigurationError(f"dead-letters[0]@{offset} was put back as {before}; --again does so once more")
    own = [(k, v) for k, v in letter.headers if not k.startswith(_ERRORS) and k not in _LETTER_HEADERS]
    written: list[Source] = []
    failed: list[str] = []

    def delivered(error: object, message: object) -> None:
        if error is not None:
            failed.append(str(error))
        else:
            at: int = message.offset()  # type: ignore[attr-defined]
            written.append(Source(topic=topic, partition=partition, offset=at))

    producer = connection.producer("requeue")
    connection.produce(
        producer, topic, letter.value if value is None else value, partition=partition, key=letter.key,
        headers=[*((k, v) for k, v in own if k != HEADER), (HEADER, str(offset).encode())], on_delivery=delivered,
    )  # fmt: skip
    producer.flush(_SECONDS)
    if not written:
        raise ConfigurationError(
            f"dead-letters[0]@{offset} could not be written to {topic}[{partition}]: "
            f"{failed[0] if failed else f'no answer within {_SECONDS:.0f} s'}"
        )
    return written[0]


def _put_back(connection: Connection, letter: RawRecord, topic: str, partition: int) -> Source | None:
    """Where the letter was put back already, None if nowhere; looks from its own time on."""
    mark = (HEADER, str(letter.offset).encode())
    since = connection.offsets_since(topic, letter.timestamp_ms)
    for raw in connection.read_topic(topic, {partition: since[partition]}):
        if mark in raw.headers:
            return raw.source
    return None
