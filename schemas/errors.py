"""The exceptions of headrace as one tree, and the exit codes of its processes.

    HeadraceError
    |-- ConfigurationError (ValueError)   settings, datasets or plug-ins that a person has to change; never retried
    |-- InvalidRecord (ValueError)        a record that may not travel: wrong lengths, non-finite numbers, bad text
    |-- UndecodableRecord (ValueError)    bytes on a topic that are not one of our records
    |-- RecordTooLarge (InvalidRecord)    a record over the topic's limit that could not be offloaded
    |-- Superseded                        another process with the same name has taken over; this one must exit
    |-- Stopping                          the process was asked to stop while it waited; nothing is wrong

Every message says what happened, where, and what to do. A process ends with ``EXIT_CONFIGURATION`` when a restart
cannot help; a supervisor gives up on it at once.
"""

__all__ = (
    "EXIT_CONFIGURATION",
    "EXIT_FAILURE",
    "EXIT_OK",
    "EXIT_SUPERSEDED",
    "ConfigurationError",
    "HeadraceError",
    "InvalidRecord",
    "RecordTooLarge",
    "Stopping",
    "Superseded",
    "UndecodableRecord",
)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_SUPERSEDED = 75
"""Another process with the same name took over (sysexits' EX_TEMPFAIL)."""
EXIT_CONFIGURATION = 78
"""A person has to change something before a restart can help (sysexits' EX_CONFIG)."""


class HeadraceError(Exception):
    """Root of every error that headrace raises on purpose."""


class ConfigurationError(HeadraceError, ValueError):
    """Settings, datasets or plug-ins that a person has to change; a restart does not help."""


class InvalidRecord(HeadraceError, ValueError):
    """A record that may not travel, found at encode: wrong lengths, non-finite numbers, text that is not UTF-8."""


class RecordTooLarge(InvalidRecord):
    """A record over the topic's size limit that could not be offloaded to the object store."""


class UndecodableRecord(HeadraceError, ValueError):
    """Bytes on a topic that are not one of our records (no Confluent header, unknown schema, broken Avro)."""


class Superseded(HeadraceError):
    """Another process with the same instance name has taken over; the holder of this error must exit."""


class Stopping(HeadraceError):
    """The process was asked to stop while it waited for something; it ends as one that has nothing left to do."""
