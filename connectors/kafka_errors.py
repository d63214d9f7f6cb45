"""What can go wrong with a cluster, in words: exceptions of the Kafka connector and the log of a client's errors.

librdkafka reports an unreachable broker or a refused login through a callback while calls merely time out; ``ErrorLog``
keeps those reasons so that the exception a person reads names them. No message holds a password.
"""

import threading
from collections import deque

from confluent_kafka import KafkaError, KafkaException

from headrace.schemas.errors import ConfigurationError, HeadraceError

__all__ = (
    "PASSING",
    "BrokerUnreachable",
    "ErrorLog",
    "KafkaFailure",
    "LoginRefused",
    "MissingTopic",
    "WrongPartitionCount",
    "error_of",
    "explain",
)

LOGIN_CODES = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL})
"""Codes that waiting does not cure: the login or the certificate is refused."""
_ACCESS_CODES = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)


PASSING = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)
"""What a reader meets while a broker goes and comes back; a topic that is really missing was looked for before."""


class KafkaFailure(HeadraceError):
    """The cluster refused or failed an operation; the message names it and the cluster's reason."""


class BrokerUnreachable(KafkaFailure):
    """No broker answered at the configured address within the time given."""


class LoginRefused(ConfigurationError):
    """The cluster refuses this login or certificate, or the rights it has; a restart does not help."""


class MissingTopic(ConfigurationError):
    """A topic of the run does not exist on the cluster."""


class WrongPartitionCount(ConfigurationError):
    """A topic exists with another partition count than the run was created with (protocol 1)."""


class ErrorLog:
    """The newest errors that a client reported on its own (``error_cb``); fed and read from any thread."""

    def __init__(self, keep: int = 20) -> None:
        self._lock = threading.Lock()
        self._entries: deque[tuple[str, str]] = deque(maxlen=keep)
        self._refused: str = ""
        self._count = 0

    def __call__(self, error: KafkaError) -> None:
        """Take one error; this object is the ``error_cb`` itself."""
        with self._lock:
            self._count += 1
            self._entries.append((error.name(), error.str()))
            if error.code() in LOGIN_CODES:
                self._refused = error.str()

    @property
    def count(self) -> int:
        """How many errors came in all; a change says that something happened since."""
        return self._count

    def last(self) -> str:
        """The newest error as ``NAME: text``, empty when there was none.

        A specific reason (a refused connection, a login) is preferred over the summary that all brokers are down.
        """
        with self._lock:
            for name, text in reversed(self._entries):
                if name != "_ALL_BROKERS_DOWN":
                    return f"{name}: {text}"
            return ": ".join(self._entries[-1]) if self._entries else ""

    def raise_refused(self, where: str) -> None:
        """Raise LoginRefused when the cluster refused the login of this client."""
        if self._refused:
            raise LoginRefused(
                f"the cluster at {where} refuses the login: {self._refused}; check [kafka] and the environment "
                "variables that it names"
            )


def error_of(error: BaseException) -> KafkaError:
    """The KafkaError inside a KafkaException. Raises the exception itself when it is none."""
    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        return error.args[0]
    raise error


def explain(error: BaseException, doing: str, where: str, log: ErrorLog | None = None) -> HeadraceError:
    """The exception to raise for a KafkaException met while ``doing`` something on the cluster at ``where``."""
    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        inner = error.args[0]
        reason = f"{inner.name()}: {inner.str()}"
        if inner.code() in LOGIN_CODES or inner.code() in _ACCESS_CODES:
            return LoginRefused(f"{doing} on the cluster at {where} is refused: {reason}")
        seen = log.last() if log is not None else ""
        if seen and seen != reason:
            reason += f" (the client reported {seen})"
        if inner.code() in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT):
            return BrokerUnreachable(f"{doing}: no answer from the cluster at {where}: {reason}")
        return KafkaFailure(f"{doing} failed on the cluster at {where}: {reason}")
    return KafkaFailure(f"{doing} failed on the cluster at {where}: {type(error).__name__}: {error}")
