"""Dead letters: what a part could not use, with its bytes and the reason, under the header names of Kafka Streams.

Goes in: bytes, where they came from and what was wrong; comes out: value and headers for the topic ``dead-letters``.
Above 1 MB the value is the first 64 KB, and headers tell size and sha256 of the whole.
"""

import hashlib
import traceback

from headrace.schemas.parts import Source

__all__ = ("dead_letter",)

_WHOLE = 1 << 20
_KEPT = 64 << 10
_LONGEST_TEXT = 8 << 10


def dead_letter(
    value: bytes | None, error: BaseException | str, *, by: str, source: Source | None = None
) -> tuple[bytes | None, list[tuple[str, bytes]]]:
    """Value and headers of a dead letter.

    value: the original bytes. error: an exception, or the reason in words. by: the stage or part and, where one did it,
    the operator. source: where the record lay, if it lay on a topic.
    """
    if isinstance(error, BaseException):
        kind, message = type(error).__name__, str(error)
        stack = "".join(traceback.format_exception(error))
    else:
        kind, message, stack = "refused", error, ""
    headers = {
        "__streams.errors.exception": kind,
        "__streams.errors.message": message,
        "__streams.errors.stacktrace": stack,
        "__streams.errors.topic": source.topic if source else "",
        "__streams.errors.partition": str(source.partition if source else -1),
        "__streams.errors.offset": str(source.offset if source else -1),
        "hr-by": by,
    }
    if value is not None and len(value) > _WHOLE:
        headers["hr-size"] = str(len(value))
        headers["hr-sha256"] = hashlib.sha256(value).hexdigest()
        value = value[:_KEPT]
    return value, [(name, text[:_LONGEST_TEXT].encode("utf-8", "backslashreplace")) for name, text in headers.items()]
