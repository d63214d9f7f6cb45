"""Brings results to their topics and says when they are acknowledged; large arrays go to the object store first.

Goes in: trajectories and other records of a worker; comes out: an awaited acknowledgement (acks=all). What may not
travel (text that is no text, numbers that are not finite, arrays too large without a store) becomes a dead letter and
an excluded trajectory, so that a group never waits for it.
"""

import asyncio
import json
import sys
import time
from dataclasses import replace

from confluent_kafka import KafkaError, Message

import headrace
from headrace.connectors.blobs import array_bytes, put_sequences
from headrace.connectors.kafka import Connection, Producer, RawRecord
from headrace.connectors.kafka_errors import KafkaFailure
from headrace.connectors.stores.store import ObjectStore, StoreError, StoreUnavailable
from headrace.pipeline.runtime.dead_letters import TOPIC, letter_headers, letter_value
from headrace.schemas.codec import encode, headers_of, to_plain
from headrace.schemas.errors import InvalidRecord
from headrace.schemas.ids import group_partition
from headrace.schemas.parts import BlobRef
from headrace.schemas.records import EvalResult, Partial, Record, Score, Trajectory

__all__ = ("Delivery",)

_LONGEST_TEXT = 64 << 10
_STAGE = "task_to_trajectory"


class Delivery:
    """Writes what one worker makes. ``poll`` runs in the worker's thread and wakes who waits for an acknowledgement.

    partitions: N, of everything keyed by group. store: for arrays above ``offload_bytes``; None when there is none.
    """

    def __init__(
        self,
        connection: Connection,
        client_id: str,
        *,
        partitions: int,
        store: ObjectStore | None,
        offload_bytes: int,
        retries: int,
    ) -> None:
        self._connection = connection
        self._producer: Producer = connection.producer(client_id, message_timeout_ms=0, linger_ms=1)
        self._partitions = partitions
        self._store = store
        self._offload_bytes = offload_bytes
        self._retries = retries
        self._failure: KafkaError | None = None
        self.unacknowledged = 0
        self.dead_letters = 0

    def poll(self, seconds: float) -> None:
        """Serve acknowledgements. Raises KafkaFailure when the producer can go on no more."""
        self._producer.poll(seconds)
        if self._failure is not None:
            raise KafkaFailure(f"results cannot be written to {self._connection.bootstrap}: {self._failure.str()}")

    async def trajectory(self, trajectory: Trajectory) -> None:
        """Write a trajectory (and its arrays) and return when it is acknowledged."""
        try:
            value = encode(await self._offloaded(trajectory))
        except (InvalidRecord, StoreError) as error:
            self.dead(json.dumps(to_plain(_clipped(trajectory)), default=str).encode("ascii"), error)
            trajectory = excluded(trajectory, f"{type(error).__name__}: {error}")
            value = encode(trajectory)
        await self._acknowledged("trajectories", trajectory, value, self._partition(trajectory.group))

    async def score(self, score: Score) -> None:
        """Write a group's scores and return when they are acknowledged."""
        await self._acknowledged("trajectories", score, encode(score), self._partition(score.group))

    async def evaluation(self, result: EvalResult) -> None:
        """Write an evaluated sample and return when it is acknowledged."""
        try:
            value = encode(result)
        except InvalidRecord as error:
            self.dead(json.dumps(to_plain(result)).encode("ascii"), error)
            result = replace(result, prompt_text="", completion_text="", reward=0.0, error=_sayable(str(error)))
            value = encode(result)
        await self._acknowledged("evals", result, value, 0)

    async def partial(self, record: Partial) -> int:
        """Write a prefix and return its offset when it is acknowledged. Raises InvalidRecord."""
        return await self._acknowledged("partials", record, encode(record), self._partition(record.group))

    def send(self, topic: str, record: Record, partition: int) -> None:
        """Write a record whose acknowledgement nobody waits for."""
        headers = headers_of(record, self._connection.run, headrace.__version__)
        self._connection.produce(self._producer, topic, encode(record), partition=partition, headers=headers)

    def dead(self, value: bytes | None, error: Exception, raw: RawRecord | None = None) -> None:
        """Write a dead letter; ``raw`` is the record that could not be used, when one was read."""
        self.dead_letters += 1
        sys.stderr.write(f"rollout: dead letter: {error}\n")
        headers = letter_headers(
            error,
            topic=self._connection.topic(raw.topic) if raw else "",
            partition=raw.partition if raw else -1,
            offset=raw.offset if raw else -1,
            value=value,
            headers=raw.headers if raw else (),
            stage=_STAGE,
        )
        self._connection.produce(self._producer, TOPIC, letter_value(value), partition=0, headers=headers)

    def close(self, seconds: float) -> int:
        """Wait for what is on its way; returns how many records are not acknowledged."""
        return int(self._producer.flush(seconds))

    async def _acknowledged(self, topic: str, record: Record, value: bytes, partition: int) -> int:
        """The record's offset, once it is acknowledged."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        headers = headers_of(record, self._connection.run, headrace.__version__)
        key = str(record.group).encode() if isinstance(record, Trajectory | Score | Partial) else None

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            self.unacknowledged -= 1
            if error is not None:
                self._failure = error
            elif not future.done():
                future.set_result(message.offset() or 0)

        self.unacknowledged += 1
        self._connection.produce(
            self._producer, topic, value, partition=partition, key=key, headers=headers, on_delivery=on_delivery
        )
        return await future

    async def _offloaded(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its arrays in the store, when they are large. Raises StoreError, InvalidRecord."""
        if array_bytes(trajectory.sequences) <= self._offload_bytes:
            return _clipped(trajectory)
        if self._store is None:
            raise StoreError(
                f"the arrays take {array_bytes(trajectory.sequences)} bytes, over rollout.offload_bytes "
                f"{self._offload_bytes}, and no object store can take them; check [store]"
            )
        holder = Partial(
            group=trajectory.group,
            replica=trajectory.replica,
            attempt=trajectory.attempt,
            worker=trajectory.worker,
            incarnation=trajectory.incarnation,
            written_ms=time.time_ns() // 1_000_000,
            sequences=trajectory.sequences,
        )
        reference = await asyncio.to_thread(self._put, self._store, holder)
        return replace(_clipped(trajectory), sequences=[], blob=reference)

    def _put(self, store: ObjectStore, holder: Partial) -> BlobRef:
        """Write, trying again with growing pauses while the store is away."""
        for attempt in range(self._retries):
            try:
                return put_sequences(store, self._connection.run, holder)
            except StoreUnavailable as error:
                sys.stderr.write(f"rollout: object store: {error}; trying again\n")
                time.sleep(min(8.0, 0.2 * 2**attempt))
        return put_sequences(store, self._connection.run, holder)

    def _partition(self, group: int) -> int:
        return group_partition(group, self._partitions)


def excluded(trajectory: Trajectory, error: str) -> Trajectory:
    """The same attempt as an excluded result that can always travel: no arrays, no text, reward 0."""
    return replace(
        trajectory,
        status="excluded",
        error=_sayable(error),
        reward=0.0,
        tokens=0,
        metrics={},
        rewards=[],
        oldest_versions={},
        roles=[],
        prompt_text="",
        completion_text="",
        blob=None,
        sequences=[],
    )


def _clipped(trajectory: Trajectory) -> Trajectory:
    """Texts above 64 K characters are cut; the tokens are the data, the text is for people."""
    if max(len(trajectory.prompt_text), len(trajectory.completion_text)) <= _LONGEST_TEXT:
        return trajectory
    return replace(
        trajectory, prompt_text=_cut(trajectory.prompt_text), completion_text=_cut(trajectory.completion_text)
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}... [{len(text) - _LONGEST_TEXT} more]"


def _sayable(text: str) -> str:
    """Text that UTF-8 can say, of a bounded length."""
    return text[:2000].encode("utf-8", "backslashreplace").decode()
