"""Dead letters: a record that a stage could not use, kept with its original bytes and the reason.

The value is the original one, the headers are the six of Kafka Streams (``__streams.errors.*``) after the record's own.
Above 1 MB the letter holds the first 64 KB and, in headers, the size and the sha256 of all; a key is cut at 16 KB.
``UnusableShare`` ends a task before a flood of such records fills a disk or eats a data set.
"""

import hashlib
import traceback
from collections import defaultdict, deque
from collections.abc import Sequence

from headrace.schemas.errors import ConfigurationError

__all__ = ("TOPIC", "UnusableFlood", "UnusableShare", "letter_headers", "letter_key", "letter_value")

TOPIC = "dead-letters"
_WHOLE_BYTES = 1 << 20
_KEPT_BYTES = 64 << 10
_STACK_CHARACTERS = 8_000
_OWN_HEADER_BYTES = 16 << 10
_KEY_BYTES = 16 << 10

HeaderList = list[tuple[str, bytes | None]]


def letter_value(value: bytes | None) -> bytes | None:
    """The value of the letter: all of it, or its first 64 KB when it is over 1 MB."""
    return value if value is None or len(value) <= _WHOLE_BYTES else value[:_KEPT_BYTES]


def letter_key(key: bytes | None) -> bytes | None:
    """The key of the letter: a foreign one may leave no room for anything else."""
    return key if key is None else key[:_KEY_BYTES]


def letter_headers(
    error: BaseException,
    *,
    topic: str,
    partition: int,
    offset: int,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]],
    stage: str,
    key: bytes | None = None,
) -> HeaderList:
    """Headers of the letter for a record at ``topic[partition]@offset`` (topic with the run's prefix).

    The record's own headers come first, unless they are over 16 KB in all; ``stage`` says who could not use it.
    """
    stack = "".join(traceback.format_exception(error))[-_STACK_CHARACTERS:]
    kind = type(error)
    own = list(headers) if sum(len(k) + len(v or b"") for k, v in headers) <= _OWN_HEADER_BYTES else []
    out: HeaderList = [
        *own,
        ("__streams.errors.exception", f"{kind.__module__}.{kind.__qualname__}".encode()),
        ("__streams.errors.message", str(error).encode("utf-8", "replace")[:_STACK_CHARACTERS]),
        ("__streams.errors.stacktrace", stack.encode("utf-8", "replace")),
        ("__streams.errors.topic", topic.encode()),
        ("__streams.errors.partition", str(partition).encode()),
        ("__streams.errors.offset", str(offset).encode()),
        ("hr-stage", stage.encode()),
    ]
    if value is not None and len(value) > _WHOLE_BYTES:
        out += [
            ("hr-size", str(len(value)).encode()),
            ("hr-sha256", hashlib.sha256(value).hexdigest().encode()),
        ]
    if key is not None and len(key) > _KEY_BYTES:
        out.append(("hr-key-size", str(len(key)).encode()))
    return out


class UnusableFlood(ConfigurationError):
    """Most records of a topic cannot be used: a person has to look before more of them are set aside."""


class UnusableShare:
    """Which of the last ``window`` records of each topic were unusable, against the ``share`` that is allowed."""

    def __init__(self, window: int, share: float) -> None:
        self._share = share
        self._allowed = window * share
        self._last: dict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=window))
        self._bad: dict[str, int] = defaultdict(int)

    def usable(self, topic: str) -> None:
        """Note a record that was used."""
        last = self._last[topic]
        if topic in self._bad and len(last) == last.maxlen:
            self._bad[topic] -= last[0]
        last.append(False)

    def unusable(self, topic: str, where: str, error: Exception) -> None:
        """Note one that went to the dead letters from the place ``where``. Raises UnusableFlood."""
        self.usable(topic)
        self._last[topic][-1] = True
        self._bad[topic] += 1
        if self._bad[topic] > self._allowed and self._share < 1:
            raise UnusableFlood(
                f"{self._bad[topic]} of the last {len(self._last[topic])} records of {topic} could not be used, the "
                f"last at {where}: {type(error).__name__}: {error}. They are in the dead letters (headrace "
                "dead-letters list). Mend what writes or reads them; runtime.max_unusable_share=1 goes on regardless"
            )
