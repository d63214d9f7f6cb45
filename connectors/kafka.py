"""One typed connection to a Kafka cluster: makes every client of a run, its topics, and reads a topic to its end.

Settings and login come from ``[kafka]`` and the environment; secrets stay in the clients and are never part of a repr,
a message or a file. All clients share the rules of protocol 2 and 7: read committed, no automatic commits or offsets,
range assignment, murmur2 partitioning, records up to 8 MB.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, TypeVar

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from headrace.connectors import kafka_admin
from headrace.connectors.kafka_diagnosis import diagnose, refuse_plain_on_tls
from headrace.connectors.kafka_errors import PASSING, BrokerUnreachable, ErrorLog, MissingTopic, explain
from headrace.connectors.kafka_login import login_settings
from headrace.schemas.access import LOOKER
from headrace.schemas.avsc import packaged_schema
from headrace.schemas.codec import FRAME_BYTES, add_writer_schema, decode, fingerprint, stamps_of
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import ConfigurationError, RecordTooLarge, Stopping, UndecodableRecord
from headrace.schemas.ids import check_run_id, topic_name, unprefixed
from headrace.schemas.parts import Source
from headrace.schemas.records import RECORD_TYPES, Record

__all__ = ("Connection", "Consumer", "Producer", "RawRecord", "headers_in")

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 8 << 20
"""Largest record, in bytes (protocol 2; ``max.message.bytes`` of the run's topics)."""
MAX_POLL_MS = 300_000
"""``max.poll.interval.ms`` of every consumer that does not say otherwise."""
TELL_SECONDS = 10.0
"""Who waits for a cluster says so this often."""
_LOOK_SECONDS = 1.5
"""Who waited so long looks once at what speaks at the address: a mistaken protocol is not cured by waiting."""
_UNSTAMPED = ("-changelog", ".dead-letters")
_FRAMING_BYTES = 16 << 10
"""Room for headers and framing: a broker counts them against the topic's limit."""

Value = str | int | float | bool
T = TypeVar("T")


class Producer(confluent_kafka.Producer):
    """A producer that keeps what its client reports: ``errors``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.errors = ErrorLog()
        super().__init__({**config, "error_cb": self.errors})


class _StampingProducer(Producer):
    """A producer that puts a registry's schema ids in the place of ours, on topics that other tools read.

    Changelogs and dead letters stay as they are: the first are read back without headers, the others are original.
    """

    def __init__(self, config: dict[str, Any], stamps: Mapping[bytes, bytes]) -> None:
        self._stamps = stamps
        super().__init__(config)

    def produce(self, topic: str, value: str | bytes | None = None, *rest: Any, **where: Any) -> None:
        """As the client's ``produce``."""
        if isinstance(value, bytes) and not topic.endswith(_UNSTAMPED):
            stamp = self._stamps.get(value[:FRAME_BYTES])
            value = value if stamp is None else stamp + value[FRAME_BYTES:]
        super().produce(topic, value, *rest, **where)


class Consumer(confluent_kafka.Consumer):
    """A consumer that keeps what its client reports: ``errors``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.errors = ErrorLog()
        super().__init__({**config, "error_cb": self.errors})


@dataclass(slots=True)
class RawRecord:
    """One record as it lies in a topic (``topic`` without the run's prefix); ``decoded`` reads it.

    Not frozen, which would double the time that it takes to make one.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None = field(repr=False)
    headers: list[tuple[str, bytes | None]]

    @property
    def source(self) -> Source:
        """The place as a part."""
        return Source(topic=self.topic, partition=self.partition, offset=self.offset)

    def decoded(self) -> Record:
        """The record. Raises UndecodableRecord when the value is none of ours."""
        return decode(self.value, self.headers)

    def decoded_if_ours(self) -> Record | None:
        """The record, or None for a value that is none of ours: one stray record must not end every reader.

        Stages and ``headrace verify`` name such records; readers of single facts pass over them.
        """
        try:
            return self.decoded()
        except UndecodableRecord:
            return None

    @classmethod
    def of(cls, message: Message, run: str) -> "RawRecord":
        """From a consumed message without error."""
        return cls(
            unprefixed(run, message.topic() or ""),
            message.partition() or 0,
            message.offset() or 0,
            message.timestamp()[1],
            message.key(),
            message.value(),
            headers_in(message),
        )


_read_headers = methodcaller("headers")
"""The client gives a list *and* sets the error. Called by its name, the interpreter may find that only later."""


def headers_in(message: Message) -> list[tuple[str, bytes | None]]:
    """Headers of a consumed message; none at all where a name is no UTF-8.

    Kafka takes such a name from any client, and ours raises at the whole list. One record must not stop its readers.
    """
    try:
        headers: Any = _read_headers(message) or []
    except (SystemError, UnicodeDecodeError):
        return []
    if isinstance(headers, list):  # the other form stands in the client's types only
        return headers
    return [(k, v.encode() if isinstance(v, str) else v) for k, v in headers.items()]


@dataclass(slots=True)
class Connection:
    """How to reach the cluster of one run; the only way in which headrace makes Kafka clients."""

    config: KafkaConfig
    run: str
    bootstrap: str
    role: str = LOOKER
    """The login that is taken where ``[kafka]`` says ``{role}`` (``schemas.access``)."""
    patience: float = 0.0
    """Seconds that questions wait for a cluster that does not answer; 0: they fail at once (see ``patient``)."""
    stopped: Callable[[], bool] = field(default=lambda: False, repr=False)
    """Says that the process must stop: nothing is waited for any more."""
    schema_ids: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Ids in the schema registry by fingerprint; empty without one (``use_schema_ids``)."""
    _stamps: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)
    _admin: AdminClient | None = field(default=None, repr=False)
    _admin_errors: ErrorLog = field(default_factory=ErrorLog, repr=False)

    @classmethod
    def of(cls, config: KafkaConfig, run: str, bootstrap: str | None = None, *, role: str = LOOKER) -> "Connection":
        """A connection for the run ``run`` as ``role``; ``bootstrap`` overrides the configured address.

        Raises ConfigurationError for a run id that cannot be used or when there is no address at all.
        """
        address = bootstrap or config.bootstrap
        if not address:
            raise ConfigurationError("no Kafka address: set kafka.bootstrap or give --bootstrap HOST:PORT")
        for name in config.settings:
            if name.startswith("sasl.") or "password" in name:
                raise ConfigurationError(
                    f"kafka.settings.{name} would be written into the run folder; name an environment variable by "
                    "kafka.sasl_username_env and kafka.sasl_password_env"
                )
            if name == "ssl.key.pem":
                raise ConfigurationError(
                    "kafka.settings.ssl.key.pem would be written into the run folder; keep the key in a file and name "
                    "it by kafka.ssl_key_location"
                )
        return cls(config, check_run_id(run), address, role)

    def patient(self, stopped: Callable[[], bool]) -> "Connection":
        """This connection as the parts of a run use it: they outlive an outage of ``kafka.patience_seconds``."""
        self.patience, self.stopped = self.config.patience_seconds, stopped
        return self

    def topic(self, name: str) -> str:
        """The name on the cluster of a topic of this run."""
        return topic_name(self.run, name)

    def use_schema_ids(self, ids: Mapping[str, int]) -> None:
        """Let records carry these ids of a registry (by fingerprint), and understand foreign ones that carry them."""
        self.schema_ids, self._stamps = dict(ids), stamps_of(ids)
        for name in RECORD_TYPES:
            if (number := ids.get(fingerprint(name))) is not None:
                add_writer_schema(packaged_schema(name), number)

    # clients

    def producer(self, client_id: str, transactional_id: str | None = None, **settings: Value) -> Producer:
        """An idempotent producer, transactional (not yet initialised) when an id is given.

        ``settings`` are librdkafka's with ``_`` for ``.`` and win over the defaults.
        """
        own: dict[str, Value] = {
            "client.id": client_id,
            "enable.idempotence": True,
            "linger.ms": 1,
            "partitioner": "murmur2_random",
            "compression.type": "none",
            "message.max.bytes": MAX_MESSAGE_BYTES - _FRAMING_BYTES,
            "batch.size": 1 << 20,
            "queue.buffering.max.kbytes": 1 << 20,
            "queue.buffering.max.messages": 1_000_000,
        }
        if transactional_id is not None:
            own |= {"transactional.id": transactional_id, "transaction.timeout.ms": 10_000}
        client = self.client_settings(own, settings)
        return _StampingProducer(client, self._stamps) if self._stamps else Producer(client)

    def consumer(self, client_id: str, group: str | None = None, **settings: Value) -> Consumer:
        """A consumer that reads committed records and never commits or resets offsets by itself.

        Without ``group`` it is for ``assign()`` only. ``settings`` are librdkafka's with ``_`` for ``.``.
        """
        own: dict[str, Value] = {
            "client.id": client_id,
            "group.id": group or f"{self.run}.reader.{client_id}",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
            "partition.assignment.strategy": "range",
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 1_000,
            "max.poll.interval.ms": MAX_POLL_MS,
            "fetch.queue.backoff.ms": 10,
            "fetch.wait.max.ms": 500,
            "fetch.error.backoff.ms": 50,
            "queued.max.messages.kbytes": 16_384,
            "fetch.message.max.bytes": 2 * MAX_MESSAGE_BYTES,
            "fetch.max.bytes": 6 * MAX_MESSAGE_BYTES,
            "receive.message.max.bytes": 8 * MAX_MESSAGE_BYTES,
            "check.crcs": True,
        }
        return Consumer(self.client_settings(own, settings))

    def admin(self) -> AdminClient:
        """The one admin client of this connection."""
        if self._admin is None:
            self._admin = AdminClient(self.client_settings({"error_cb": self._admin_errors}, {}))
        return self._admin

    def client_settings(self, own: Mapping[str, Any], over: Mapping[str, Value]) -> dict[str, Any]:
        """Settings of one client: connection, defaults, ``[kafka.settings]``, the caller's; the login comes last."""
        config = self.config
        out: dict[str, Any] = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": config.security_protocol,
            "reconnect.backoff.ms": 100,
            "reconnect.backoff.max.ms": 1_000,
            "socket.keepalive.enable": True,
            "metadata.recovery.strategy": "none",
            "log_level": 0,
            **own,
            **config.settings,
            **{name.replace("_", "."): value for name, value in over.items()},
        }
        files = {
            "ssl.ca.location": config.ssl_ca_location,
            "ssl.certificate.location": config.ssl_certificate_location,
            "ssl.key.location": config.ssl_key_location,
        }
        out.update({name: value for name, value in files.items() if value})
        out.update(login_settings(config, self.role))
        return out

    # the cluster

    def wait_for_broker(
        self, timeout: float | None = None, stopped: Callable[[], bool] | None = None, what: str = ""
    ) -> None:
        """Return once a broker answers, or ``stopped`` says so; says every few seconds what is waited for.

        ``timeout`` is in seconds; without it a patient connection waits as long as its patience, others 30 s. ``what``
        says what for. Raises BrokerUnreachable at its end, LoginRefused at once; Stopping on a patient connection.
        """
        timeout = timeout if timeout is not None else self.patience or 30.0
        stopped = stopped or self.stopped
        began = told = time.monotonic()
        looked = False
        while not stopped():
            try:
                self.admin().list_topics(timeout=min(1.0, max(0.1, began + timeout - time.monotonic())))
                if told > began:
                    log.warning("Kafka at %s is back after %.0f s", self.bootstrap, time.monotonic() - began)
                return
            except KafkaException as error:
                self.admin().poll(0)
                self._admin_errors.raise_refused(self.bootstrap)
                reason = self._admin_errors.last() or error.args[0].str()
            now = time.monotonic()
            if not looked and now - began > _LOOK_SECONDS:
                looked = True
                refuse_plain_on_tls(self.bootstrap, self.config.security_protocol)
            if now >= began + timeout:
                raise BrokerUnreachable(
                    f"no Kafka broker answers at {self.bootstrap} within {timeout:g} s{what and f' ({what})'}: "
                    f"{reason}; {diagnose(self.bootstrap, self.config.security_protocol)}"
                ) from None
            if now - told > (TELL_SECONDS if told > began else 1.0):
                told = now
                log.warning(
                    "waiting for Kafka at %s%s: %s; up to %.0f s more",
                    self.bootstrap, what and f", {what}", reason, began + timeout - now,
                )  # fmt: skip
            time.sleep(0.05)
        self._refuse_when_stopped()

    def _refuse_when_stopped(self) -> None:
        """Raise Stopping on a patient connection of a process that must stop: it asks for nothing more."""
        if self.patience and self.stopped():
            raise Stopping(f"stopped while waiting for Kafka at {self.bootstrap}")

    def answers(self, timeout: float = 1.0) -> bool:
        """True when a broker answers within ``timeout`` seconds."""
        try:
            self.admin().list_topics(timeout=timeout)
        except KafkaException:
            return False
        return True

    def ensure_topics(self, counts: Mapping[str, int]) -> list[str]:
        """Create the topics (names without prefix, partition counts) that are missing; returns those it created.

        Idempotent and safe to race. Raises WrongPartitionCount when one exists with another count.
        """
        return self._doing(
            "creating topics",
            lambda: kafka_admin.ensure_topics(self.admin(), self.run, counts, self.config.replication_factor),
        )

    def list_run_topics(self) -> dict[str, int]:
        """Partition counts of the run's topics by name without prefix; empty when the run does not exist."""
        return self._doing("listing topics", lambda: kafka_admin.list_run_topics(self.admin(), self.run))

    def delete_run_topics(self) -> list[str]:
        """Delete every topic and consumer group of the run; returns the topics' names without prefix."""
        return self._doing("deleting topics", lambda: kafka_admin.delete_run_topics(self.admin(), self.run))

    def partition_count(self, topic: str) -> int:
        """Partitions of a topic of the run. Raises MissingTopic."""
        count = self.list_run_topics().get(topic)
        if count is None:
            raise MissingTopic(
                f"topic {self.topic(topic)} does not exist on the cluster at {self.bootstrap}; has run "
                f"{self.run} been created there?"
            )
        return count

    def end_offsets(self, topic: str, *, committed: bool = True) -> dict[int, int]:
        """End offset of each partition: the last stable one, or with ``committed=False`` the high watermark."""
        places = [(topic, p) for p in range(self.partition_count(topic))]
        ends = self._doing(
            f"asking for the end of {self.topic(topic)}",
            lambda: kafka_admin.offsets_at(self.admin(), self.run, places, "latest", committed=committed),
        )
        return {partition: offset for (_, partition), offset in ends.items()}

    def start_offsets(self, topic: str) -> dict[int, int]:
        """Offset of the first record that each partition still holds."""
        places = [(topic, p) for p in range(self.partition_count(topic))]
        starts = self._doing(
            f"asking for the start of {self.topic(topic)}",
            lambda: kafka_admin.offsets_at(self.admin(), self.run, places, "earliest", committed=True),
        )
        return {partition: offset for (_, partition), offset in starts.items()}

    def offsets_since(self, topic: str, milliseconds: int) -> dict[int, int]:
        """Offset of the first record of each partition that is not older than a time (since the epoch), or its end."""
        places = [(topic, p) for p in range(self.partition_count(topic))]
        found = self._doing(
            f"asking for offsets of {self.topic(topic)} by time",
            lambda: kafka_admin.offsets_at(self.admin(), self.run, places, milliseconds, committed=True),
        )
        ends = self.end_offsets(topic)
        return {p: offset if offset >= 0 else ends[p] for (_, p), offset in found.items()}

    def read_topic(
        self,
        topic: str,
        start: Mapping[int, int] | None = None,
        *,
        until: Mapping[int, int] | None = None,
        wanted: Callable[[Message], bool] | None = None,
        timeout: float = 30.0,
    ) -> Iterator[RawRecord]:
        """The committed records of a topic of the run, from ``start`` (default: the first kept) to the end seen now.

        ``start`` maps partitions to offsets; partitions left out are not read. ``until`` ends partitions before its
        offsets, ``wanted`` passes over messages of the client, which is far cheaper than looking at records. Order
        holds within a partition.
        Raises MissingTopic, or BrokerUnreachable when nothing comes for ``timeout`` seconds.
        """
        ends = self.end_offsets(topic)
        if until is not None:
            ends = {p: min(end, until.get(p, end)) for p, end in ends.items()}
        first = self.start_offsets(topic)
        at = {p: max(o, first[p]) for p, o in start.items()} if start is not None else first
        left = {p for p, offset in at.items() if offset < ends[p]}
        if not left:
            return
        consumer = self.consumer(f"read.{topic}", enable_partition_eof=True, fetch_wait_max_ms=10)
        try:
            consumer.assign([TopicPartition(self.topic(topic), p, at[p]) for p in sorted(left)])
            quiet_since = time.monotonic()
            while left:
                message = consumer.poll(0.2)
                if message is None:
                    quiet = time.monotonic() - quiet_since
                    self._refuse_when_stopped()
                    if quiet > max(timeout, self.patience):
                        raise BrokerUnreachable(
                            f"reading {self.topic(topic)} at {self.bootstrap}: nothing came for {quiet:.0f} s; "
                            f"{consumer.errors.last() or 'no error was reported'}"
                        )
                    continue
                quiet_since = time.monotonic()
                partition, offset = message.partition() or 0, message.offset() or 0
                error = message.error()
                if error is not None:
                    if error.code() != KafkaError._PARTITION_EOF:
                        if self.patience and error.code() in PASSING:
                            continue
                        raise explain(KafkaException(error), f"reading {self.topic(topic)}", self.bootstrap)
                    left.discard(partition)
                    continue
                if offset + 1 >= ends[partition]:
                    left.discard(partition)
                if offset < ends[partition] and (wanted is None or wanted(message)):
                    yield RawRecord.of(message, self.run)
        finally:
            consumer.close()

    def produce(self, producer: Producer, topic: str, value: bytes | None, **where: Any) -> None:
        """``producer.produce`` on a topic of the run, waiting while the client's queue is full.

        ``where`` is what confluent_kafka takes: partition, key, headers, on_delivery. Raises RecordTooLarge naming
        the record's place for one over the limit.
        """
        while True:
            try:
                producer.produce(self.topic(topic), value, **where)
                return
            except BufferError:
                producer.poll(0.05)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
                    raise
                raise RecordTooLarge(
                    f"a record of {len(value or b'')} bytes for {self.topic(topic)}[{where.get('partition', -1)}] "
                    f"(key {where.get('key')!r}) is over the limit of {MAX_MESSAGE_BYTES} bytes; offload its arrays "
                    "to the object store (rollout.offload_bytes)"
                ) from None

    def _doing(self, what: str, call: Callable[[], T]) -> T:
        """Ask the cluster; a patient connection asks again once a cluster that did not answer is back."""
        until = time.monotonic() + self.patience
        while True:
            try:
                return call()
            except KafkaException as error:
                self._admin_errors.raise_refused(self.bootstrap)
                explained = explain(error, what, self.bootstrap, self._admin_errors)
                left = until - time.monotonic()
                if not isinstance(explained, BrokerUnreachable) or left <= 0:
                    raise explained from error
            self.wait_for_broker(left, what=what)
