"""What a worker promises to a stage across the broker: dead letters, timers, positions, metadata, a quick hop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from batch_maker import build_batch
from confluent_kafka import KafkaException, TopicPartition
from raw_kafka import RawClient
from toy_worker import Chain, check_chain, feed, make_run, running, send, toy, wait_for_chain

from headrace.connectors.broker.codes import Code
from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_errors import MissingTopic
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.marks import Mark
from headrace.pipeline.requeue import requeue
from headrace.pipeline.runtime.stage import Context, Received
from headrace.pipeline.runtime.worker import Worker, wall_ms
from headrace.schemas.codec import decode, encode, headers_of
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.ids import consumer_group
from headrace.schemas.records import Failed

Run = tuple[RunConfig, Connection]


@pytest.fixture
def run(bootstrap: str) -> Iterator[Run]:
    config, connection = make_run(bootstrap)
    yield config, connection


def worker(run: Run, stop: StopSignal, instance: str = "a", stage: type = Chain, sub: str = "assemble") -> Worker:
    config, connection = run
    return Worker(connection, config, sub, instance, stage, stop=stop)


def work(run: Run, until: int) -> list[Failed]:
    """Run a worker until the toy's output has so many records."""
    stop = StopSignal()
    with running(worker(run, stop), stop) as errors:
        out = wait_for_chain(run[1], until)
    assert not errors
    return out


def test_garbage_and_raising_records_are_buried_and_leave_nothing_half_done(run: Run) -> None:
    _, connection = run
    send(connection, "admissions", [(0, toy(0)), (0, b"\xff garbage"), (0, toy(1, "boom")), (0, toy(2)), (0, b"")])
    out = work(run, 2)
    check_chain(out, range(0, 3, 2))
    letters = list(connection.read_topic("dead-letters"))
    headers = [dict(letter.headers) for letter in letters]
    assert [letter.value for letter in letters] == [b"\xff garbage", encode(toy(1, "boom")), b""]
    assert [h["__streams.errors.offset"] for h in headers] == [b"1", b"2", b"4"]
    assert {h["__streams.errors.topic"] for h in headers} == {connection.topic("admissions").encode()}
    assert headers[1]["__streams.errors.exception"] == b"builtins.ValueError"
    assert headers[1]["__streams.errors.message"] == b"boom"
    assert b"raise ValueError" in (headers[1]["__streams.errors.stacktrace"] or b"")
    assert headers[1]["hr-record"] == b"Failed"


def test_records_as_only_foreign_clients_write_them_stop_nobody(run: Run, bootstrap: str) -> None:
    """A header whose name is no UTF-8 (kcat writes it), and a key that leaves no room for the letter's headers."""
    _, connection = run
    topic, odd, now = connection.topic("admissions"), [(b"\xff\xfe", b"1")], [wall_ms()]
    long = bytes((8 << 20) - 1000)
    with RawClient(bootstrap) as client:
        for key, value, headers in ((b"k", encode(toy(0)), odd), (b"k", b"\xff garbage", odd), (long, b"\xff", [])):
            assert client.produce(topic, build_batch([(key, value)], timestamps=now, headers=headers))[0] == Code.NONE
    send(connection, "admissions", [(0, toy(1))])
    check_chain(work(run, 2), range(2))
    letters = list(connection.read_topic("dead-letters"))
    assert [letter.value for letter in letters] == [b"\xff garbage", b"\xff"]
    assert [len(letter.key or b"") for letter in letters] == [1, 16 << 10]
    assert dict(letters[1].headers)["hr-key-size"] == str(len(long)).encode()
    with pytest.raises(ConfigurationError, match="first 16384 of 8387608 bytes of its key"):
        requeue(connection, letters[1].offset)


@pytest.mark.parametrize("partition", [b"x", b"99", b"-1", b""])
def test_a_letter_of_somebody_else_is_put_back_nowhere(run: Run, partition: bytes) -> None:
    _, connection = run
    place = [("__streams.errors.topic", connection.topic("admissions")), ("__streams.errors.partition", partition)]
    producer = connection.producer("stranger")
    connection.produce(producer, "dead-letters", b"x", partition=0, headers=place)
    assert producer.flush(20) == 0
    with pytest.raises(ConfigurationError, match="no place to put it back to"):
        requeue(connection, 0)


def test_output_carries_headers_and_decodes(run: Run) -> None:
    _, connection = run
    send(connection, "admissions", [(3, toy(5))])
    work(run, 1)
    (raw,) = connection.read_topic("groups")
    assert dict(raw.headers)["hr-record"] == b"Failed"
    assert dict(raw.headers)["hr-run"] == connection.run.encode()


def test_state_positions_and_timers_survive_a_restart(run: Run) -> None:
    _, connection = run
    due = wall_ms() + 8_000
    send(connection, "admissions", [(1, toy(1)), (1, toy(2, f"timer:{due}"))])
    work(run, 2)
    assert wall_ms() < due, "this machine is too busy to tell"
    send(connection, "admissions", [(1, toy(3))])
    stop = StopSignal()
    with running(worker(run, stop), stop) as errors:
        check_chain(wait_for_chain(connection, 3), range(1, 4))
        fired = _ledger(connection, seconds=30)
    assert not errors
    assert fired == [Failed(kind="train", group=2, replica=0, attempts=0, lost_leases=0, reason=f"{due} 3")]
    assert wall_ms() >= due


def test_a_timer_due_while_nobody_ran_waits_until_the_inputs_are_read(run: Run) -> None:
    """The stage counts what it folded: the timer fires after all that was in the topic, although it was due before."""
    _, connection = run
    due = wall_ms() + 6_000
    send(connection, "admissions", [(2, toy(0, f"timer:{due}"))])
    work(run, 1)
    assert wall_ms() < due, "this machine is too busy to tell"
    time.sleep((due - wall_ms()) / 1000)
    send(connection, "admissions", [(2, toy(n)) for n in range(1, 400)])
    stop = StopSignal()
    with running(worker(run, stop), stop):
        fired = _ledger(connection, seconds=15)
    assert [r.reason.split()[1] for r in fired] == ["400"]


def _ledger(connection: Connection, seconds: float) -> list[Failed]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        out = [r for raw in connection.read_topic("ledger") if isinstance(r := raw.decoded(), Failed)]
        if out:
            return out
        time.sleep(0.1)
    return []


def test_missing_group_offsets_are_taken_from_the_changelog(run: Run) -> None:
    _, connection = run
    feed(connection, range(40))
    check_chain(work(run, 40), range(40))
    _delete_group(connection)
    feed(connection, range(40, 60))
    check_chain(work(run, 60), range(60))


def test_different_group_offsets_are_refused_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, connection = run
    monkeypatch.setattr("headrace.pipeline.runtime.attach.SETTLE_SECONDS", 1.0)
    feed(connection, range(40))
    work(run, 40)
    _delete_group(connection)
    group = consumer_group(connection.run, "assemble")
    stranger = connection.consumer("stranger", group)
    stranger.commit(offsets=[TopicPartition(connection.topic("admissions"), 1, 3)], asynchronous=False)
    stranger.close()
    stop = StopSignal()
    with running(worker(run, stop), stop) as errors:
        end = time.monotonic() + 30
        while not errors and time.monotonic() < end:
            time.sleep(0.1)
    assert [type(e) for e in errors] == [ConfigurationError]
    assert f"{connection.topic('admissions')}[1]: group 3, changelog" in str(errors[0])


def test_old_offsets_of_our_own_give_way_to_the_changelog(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apache Kafka 4.3.1, killed under load, gave the offsets of ten minutes before as the group's stable ones."""
    _, connection = run
    monkeypatch.setattr("headrace.pipeline.runtime.attach.SETTLE_SECONDS", 1.0)
    feed(connection, range(40))
    check_chain(work(run, 40), range(40))
    _delete_group(connection)
    old = TopicPartition(connection.topic("admissions"), 1, 3, str(Mark("a", 1)))
    before = connection.consumer("before", consumer_group(connection.run, "assemble"))
    before.commit(offsets=[old], asynchronous=False)
    before.close()
    feed(connection, range(40, 60))
    check_chain(work(run, 60), range(60))


def _delete_group(connection: Connection) -> None:
    """Delete the offsets as an operator would, once the group's members have gone."""
    group = consumer_group(connection.run, "assemble")
    end = time.monotonic() + 20
    while True:
        try:
            connection.admin().delete_consumer_groups([group])[group].result(10)
            return
        except KafkaException:
            if time.monotonic() > end:
                raise
            time.sleep(0.3)


def test_records_lost_below_a_position_end_the_worker_with_their_place(run: Run) -> None:
    _, connection = run
    feed(connection, range(40))
    work(run, 40)
    feed(connection, range(40, 80))
    place = TopicPartition(connection.topic("admissions"), 0, 15)
    connection.admin().delete_records([place])[place].result(10)
    stop = StopSignal()
    with running(worker(run, stop), stop) as errors:
        end = time.monotonic() + 30
        while not errors and time.monotonic() < end:
            time.sleep(0.1)
    assert [type(e) for e in errors] == [ConfigurationError]
    assert f"{connection.topic('admissions')}[0]@10" in str(errors[0])


def test_a_topic_deleted_by_hand_ends_the_worker_with_its_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, connection = run
    topic = connection.topic("trajectories")
    monkeypatch.setattr("headrace.pipeline.runtime.presence.GONE_SECONDS", 0.5)
    feed(connection, range(8))
    stop = StopSignal()
    with running(worker(run, stop), stop) as errors:
        check_chain(wait_for_chain(connection, 8), range(8))
        connection.admin().delete_topics([topic])[topic].result(20)
        end = time.monotonic() + 60
        while not errors and time.monotonic() < end:
            feed(connection, range(8, 9))
            time.sleep(0.2)
    assert [type(e) for e in errors] == [MissingTopic], errors
    assert f"topics {topic} do not exist" in str(errors[0])


def test_two_instances_share_the_tasks_and_a_clean_stop_hands_them_over(run: Run) -> None:
    _, connection = run
    numbers = range(600)
    feeder = threading.Thread(target=feed, args=(connection, numbers, 0.01))
    first, second = StopSignal(), StopSignal()
    with running(worker(run, first, "a"), first) as one:
        feeder.start()
        time.sleep(1.5)
        with running(worker(run, second, "b"), second) as two:
            time.sleep(2.5)
            first.set("scale in")
            feeder.join()
            check_chain(wait_for_chain(connection, len(numbers)), numbers)
    assert not one
    assert not two


def test_the_sweep_is_never_seen(run: Run) -> None:
    _, connection = run
    feed(connection, range(1))
    check_chain(work(run, 1), range(1))
    assert connection.end_offsets("ledger", committed=False)[0] >= 2, "the sweep wrote its record and an abort marker"
    assert list(connection.read_topic("ledger")) == []


class _Hop(Chain):
    """Hands each record on."""

    target = ""

    def process(self, received: Received, context: Context) -> None:
        self.count += 1
        context.store().put(b"count", str(self.count).encode())
        context.emit(self.target, received.record, partition=0)


class _ToAdmissions(_Hop):
    target = "admissions"


class _ToGroups(_Hop):
    target = "groups"


class _ToBatches(_Hop):
    target = "batches.main"


def test_three_stages_take_a_fraction_of_a_commit_interval(run: Run) -> None:
    """At 20 records/s; the bar is wide because other work shares the machine, the figure is printed."""
    config, connection = run
    count, rate, took = 60, 20.0, []
    stop = StopSignal()
    chain = (("schedule", _ToAdmissions), ("assemble", _ToGroups), ("batch", _ToBatches))
    threads = [threading.Thread(target=worker(run, stop, "a", stage, sub).run) for sub, stage in chain]
    for thread in threads:
        thread.start()
    try:
        sink = connection.consumer("sink")
        sink.assign([TopicPartition(connection.topic("batches.main"), 0, 0)])
        producer = connection.producer("feed", linger_ms=0)
        time.sleep(2.5)

        def play() -> None:
            began = time.monotonic()
            for n in range(count):
                time.sleep(max(0.0, began + n / rate - time.monotonic()))
                record = toy(n, repr(time.monotonic()))
                headers = headers_of(record, config.run.id, "0")
                connection.produce(producer, "demand", encode(record), partition=0, headers=headers)
                producer.poll(0)

        player = threading.Thread(target=play)
        player.start()
        while len(took) < count and (message := sink.poll(20)) is not None:
            record = decode(message.value(), message.headers())
            assert isinstance(record, Failed)
            took.append(time.monotonic() - float(record.reason))
        player.join()
        sink.close()
    finally:
        stop.set("test")
        for thread in threads:
            thread.join(30)
    took.sort()
    print(
        f"three stages at {rate:.0f}/s: p50 {took[count // 2] * 1000:.1f} ms, p90 {took[count * 9 // 10] * 1000:.1f} ms"
    )
    assert len(took) == count
    assert took[count // 2] < 2.0
