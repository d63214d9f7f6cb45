"""The source of a stream: datasets become Prompt records, in order, once, a bounded stretch ahead of the schedule.

Goes in: a dataset; comes out: Prompts in the topic ``prompts``, then End. One transactional producer; the last
committed Prompt says where to go on, so a source may die at any time (protocol 2, 9, 10). The first stream's source
publishes the held-out prompts under the stream ``@eval`` before anything else. A dataset that changed under a run is
refused.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaException, TopicPartition

import headrace
from headrace.connectors.datasets.prompts import PromptDataset
from headrace.connectors.kafka import Connection, Consumer, Producer, RawRecord
from headrace.connectors.lifetime import StopSignal, exit_with
from headrace.connectors.plugins import installed
from headrace.connectors.schema_ids import take_schema_ids
from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.pipeline.runtime.dead_letters import TOPIC, letter_headers, letter_value
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig, StreamConfig, read_config
from headrace.schemas.errors import ConfigurationError, InvalidRecord
from headrace.schemas.ids import consumer_group, transactional_id
from headrace.schemas.records import End, Prompt, Record, RunEnd, Taken

__all__ = ("Progress", "Source", "main", "read_progress")

LEAD = 4096
"""Most records that ``prompts`` holds beyond what ``schedule`` has committed."""
STREAM_LEAD = 512
"""Most prompts of a stream beyond what ``schedule`` has used, in runs of several streams: it reads on while one of them
is absent, and what it keeps then is bounded by this. Larger than the stretch between two Taken records."""
_PER_TRANSACTION = 256
_DATASET_HEADER = "hr-dataset"
_CALL_SECONDS = 10.0
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stream is in the topic: position of the next prompt, whether End stands there, digest in force."""

    position: int = 0
    ended: bool = False
    digest: str = ""


def read_progress(connection: Connection, stream: str, *, whole: bool = False) -> Progress:
    """The progress of a stream, from the last committed records of ``prompts``; ``whole`` looks at all of them."""
    start, end = connection.start_offsets("prompts")[0], connection.end_offsets("prompts")[0]
    back = end - start if whole else 2 * LEAD
    while True:
        begin = max(start, end - back)
        found = Progress()
        for raw in connection.read_topic("prompts", {0: begin}):
            record = raw.decoded_if_ours()
            if isinstance(record, Prompt) and record.stream == stream:
                digest = dict(raw.headers).get(_DATASET_HEADER) or b""
                found = Progress(record.position + 1, found.ended, digest.decode("ascii", "replace"))
            elif isinstance(record, End) and record.stream == stream:
                found = Progress(max(found.position, record.count), True, found.digest)
        if found != Progress() or begin == start:
            return found
        back *= 4


class Source:
    """Publishes the prompts of one stream until its end or the run's."""

    def __init__(self, connection: Connection, config: RunConfig, stream: str, instance: str, stop: StopSignal) -> None:
        self._connection = connection
        self._config = config
        self._stream = stream
        self._instance = instance
        self._stop = stop
        rewards = installed("headrace.rewards")
        section = config.streams[stream]
        self._dataset = PromptDataset(stream, section, rewards=rewards, seed=config.run.seed)
        self._held_out: PromptDataset | None = None
        if config.eval.dataset and stream == next(iter(config.streams)):
            self._held_out = PromptDataset(
                EVALUATION_STREAM, _held_out_section(config, section), rewards=rewards, limit=config.eval.limit
            )
        self._run_end = _RunEnd(connection, instance)
        self._lost = 0
        """Producers lost one after the other, with nothing committed between."""

    def run(self) -> None:
        """Publish; returns when the stream has ended, the run has, or the process should stop."""
        while True:
            producer = self._connection.producer(
                self._instance, transactional_id(self._config.run.id, "source", self._stream)
            )
            try:
                _patiently(lambda: producer.init_transactions(_CALL_SECONDS), self._stop)  # noqa: B023
                self._publish_all(producer)
                return
            except KafkaException as error:
                # what is committed says where to go on, so a lost producer costs only the open transaction
                self._lost += 1
                if self._lost >= _TRIES:
                    raise
                _say(f"the producer is lost ({error.args[0].str()}); going on with a new one from the last commit")
                self._stop.wait(1.0)

    def close(self) -> None:
        """Leave the cluster."""
        self._run_end.close()

    def _publish_all(self, producer: Producer) -> None:
        if self._held_out is not None:
            self._publish(producer, self._held_out, EVALUATION_STREAM, len(self._held_out))
        elif self._config.eval.dataset and not self._wait_for_first_stream():
            return
        epochs = self._config.streams[self._stream].epochs
        total = epochs * len(self._dataset) if epochs else sys.maxsize
        progress = self._publish(producer, self._dataset, self._stream, total)
        if progress.ended or progress.position < total:
            return
        self._transact(producer, [End(reason="epochs", count=total, stream=self._stream)], "")
        _say(f"stream {self._stream}: {total} prompts in {epochs} epochs, all published")

    def _wait_for_first_stream(self) -> bool:
        """Held-out prompts stand before all others, so wait for what follows them; false when the run stops first."""
        first = next(iter(self._config.streams))
        while read_progress(self._connection, first) == Progress():
            if self._stop.is_set() or self._run_end.wait(0.5):
                return False
        return True

    def _publish(self, producer: Producer, dataset: PromptDataset, stream: str, total: int) -> Progress:
        """Publish a stream's prompts up to ``total``; stops early with the run."""
        progress = read_progress(self._connection, stream, whole=stream == EVALUATION_STREAM and self._fresh())
        if progress.position and progress.digest and progress.digest != dataset.digest:
            raise ConfigurationError(
                f"the dataset of stream {stream} (or its seed or columns) has changed since this run published from "
                f"it: digest {progress.digest} then, {dataset.digest} now; {progress.position} prompts are published. "
                "Give back the dataset and settings, or start a new run"
            )
        position = progress.position
        if position == 0:
            self._name_bad_rows(producer, dataset, stream)
        elif not progress.ended:
            _say(f"stream {stream}: going on at position {position}")
        while not progress.ended and position < total and not self._stop.is_set():
            room = self._room(position)
            if room <= 0:
                if self._run_end.wait(0.5):
                    break
                continue
            count = min(_PER_TRANSACTION, room, total - position)
            self._transact(producer, (dataset.prompt(position + i) for i in range(count)), dataset.digest)
            position += count
        return Progress(position, progress.ended, dataset.digest)

    def _fresh(self) -> bool:
        """Whether the first training prompt is not there yet, so that the held-out ones may be incomplete."""
        return read_progress(self._connection, self._stream).position == 0

    def _room(self, position: int) -> int:
        """Prompts that may be written now, the next one at ``position`` of the stream."""
        end = self._connection.end_offsets("prompts", committed=False)[0]
        room = LEAD - (end - self._run_end.schedule_position())
        if len(self._config.streams) > 1:
            room = min(room, STREAM_LEAD - (position - self._run_end.taken.get(self._stream, 0)))
        return room

    def _name_bad_rows(self, producer: Producer, dataset: PromptDataset, stream: str) -> None:
        if not dataset.bad:
            return

        def produce() -> None:
            for row in dataset.bad:
                error = InvalidRecord(f"stream {stream}: {row.where}: {row.reason}")
                headers = letter_headers(
                    error, topic="", partition=-1, offset=-1, value=row.raw, headers=(), stage="dataset_to_prompt"
                )
                self._connection.produce(producer, TOPIC, letter_value(row.raw), partition=0, headers=headers)

        self._commit(producer, produce)
        _say(f"stream {stream}: {len(dataset.bad)} rows cannot be used; they are named in dead-letters")

    def _transact(self, producer: Producer, records: "list[Record] | Iterator[Prompt]", digest: str) -> None:
        def produce() -> None:
            for record in records:
                headers = headers_of(record, self._config.run.id, headrace.__version__)
                if digest:
                    headers.append((_DATASET_HEADER, digest.encode()))
                self._connection.produce(producer, "prompts", encode(record), partition=0, headers=headers)

        self._commit(producer, produce)

    def _commit(self, producer: Producer, produce: Callable[[], None]) -> None:
        producer.begin_transaction()
        produce()
        _patiently(lambda: producer.commit_transaction(_CALL_SECONDS), self._stop)
        self._lost = 0


class _RunEnd:
    """Asks the cluster how far ``schedule`` is, and whether the run has ended."""

    def __init__(self, connection: Connection, instance: str) -> None:
        self._place = TopicPartition(connection.topic("prompts"), 0)
        self._schedule: Consumer = connection.consumer(instance, consumer_group(connection.run, "schedule"))
        self._run = connection.run
        self._ended = False
        self.taken: dict[str, int] = {}
        """Stream to the position that its prompts have been used up to."""
        self._marks = connection.consumer(f"{instance}.run", auto_offset_reset="earliest")
        self._marks.assign([TopicPartition(connection.topic("run"), 0, 0)])

    def schedule_position(self) -> int:
        """The offset that ``schedule`` has committed for ``prompts``; 0 before the first commit or without answer."""
        try:
            return max(0, self._schedule.committed([self._place], timeout=_CALL_SECONDS)[0].offset)
        except KafkaException:
            return 0

    def wait(self, seconds: float) -> bool:
        """Sleep for up to ``seconds``; true once the end mark stands."""
        message = None if self._ended else self._marks.poll(seconds)
        while message is not None and message.error() is None and not self._ended:
            record = RawRecord.of(message, self._run).decoded_if_ours()
            self._ended = isinstance(record, RunEnd)
            if isinstance(record, Taken):
                self.taken[record.stream] = record.position
            message = self._marks.poll(0)
        return self._ended

    def close(self) -> None:
        """Leave the cluster."""
        self._schedule.close()
        self._marks.close()


def _held_out_section(config: RunConfig, stream: StreamConfig) -> StreamConfig:
    """The stream's settings for the held-out rows: their own file, their order as it stands."""
    over = {"dataset": config.eval.dataset, "format": "auto", "shuffle": False, "epochs": 1}
    if config.eval.reward:
        over |= {"reward": config.eval.reward, "reward_column": ""}
    return stream.model_copy(update=over)


def _patiently(call: Callable[[], object], stop: StopSignal) -> None:
    """Repeat a transactional call while the cluster is away; what cannot be repeated is raised."""
    while True:
        try:
            call()
            return
        except KafkaException as error:
            if not error.args[0].retriable() or stop.is_set():
                raise


def _say(text: str) -> None:
    sys.stdout.write(f"source: {text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """``python -m headrace.pipeline.dataset_to_prompt``: run the source of one stream."""
    parser = argparse.ArgumentParser(prog="headrace.pipeline.dataset_to_prompt", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved config.json")
    parser.add_argument("--stream", required=True, help="name of the stream")
    parser.add_argument("--instance", required=True, help="name of this process")
    parser.add_argument("--bootstrap", default=None, help="Kafka address, over the configured one")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input closes")
    options = parser.parse_args(arguments)
    stop = StopSignal().listen(with_parent=options.exit_with_parent)

    def run() -> None:
        config = read_config(options.config)
        if options.stream not in config.streams:
            raise ConfigurationError(f"there is no stream {options.stream!r}; streams are {', '.join(config.streams)}")
        connection = Connection.of(config.kafka, config.run.id, options.bootstrap, role="source")
        connection.patient(stop.is_set).wait_for_broker()
        take_schema_ids(connection, config.registry)
        source = Source(connection, config, options.stream, options.instance, stop)
        try:
            source.run()
        finally:
            source.close()

    return exit_with(run)


if __name__ == "__main__":
    sys.exit(main())
