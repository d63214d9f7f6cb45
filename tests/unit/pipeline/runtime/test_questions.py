"""Questions to the cluster: repeated until there is an answer, the process must stop, or the time given is over."""

import time

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from headrace.connectors.kafka import Connection
from headrace.connectors.lifetime import StopSignal
from headrace.connectors.transaction import ProducerLost
from headrace.pipeline.runtime.questions import Questions, Unanswered
from headrace.schemas.config import KafkaConfig


@pytest.fixture
def stop():
    return StopSignal()


@pytest.fixture
def questions(stop):
    connection = Connection.of(KafkaConfig(bootstrap="127.0.0.1:1"), "first")
    made = Questions(connection, connection.consumer("reader"), "first.assemble", "assemble.a", stop)
    yield made
    made.consumer.close()
    made.close()


def _failing(times: int):
    """A question that fails so often before it is answered, and the number of times that it was asked."""
    asked = []

    def ask() -> str:
        asked.append(None)
        if len(asked) <= times:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return "answer"

    return ask, asked


def test_a_question_is_repeated_until_it_is_answered(questions):
    ask, asked = _failing(2)
    assert questions.patiently("it", ask) == "answer"
    assert len(asked) == 3


def test_a_question_with_a_limit_ends_unanswered(questions):
    ask, asked = _failing(10**6)
    began = time.monotonic()
    with pytest.raises(Unanswered, match="no answer about the marks for 0 s"):
        questions.patiently("the marks", ask, limit=0.4)
    assert 2 <= len(asked) <= 4
    assert time.monotonic() - began < 5


def test_a_process_that_must_stop_does_not_wait_for_answers(questions, stop):
    stop.set("asked")
    with pytest.raises(ProducerLost, match="stopped while asking for it"):
        questions.patiently("it", _failing(10**6)[0])


class Moved:
    """A client that asks the leader that it knows, who is dead, until it looks who leads the topic now."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    def offsets_for_times(self, wanted, timeout):
        if not {place.topic for place in wanted} <= self.known:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return [TopicPartition(place.topic, place.partition, 7) for place in wanted]

    def list_topics(self, topic, timeout):
        if topic == "first.ledger":
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        self.known.add(topic)

    def close(self): ...


def test_ends_that_nobody_tells_are_asked_of_who_leads_now(questions):
    questions._asker.close()
    questions._asker = Moved()
    places = [("groups", 0), ("groups", 1), ("steps", 0)]
    assert questions.ends(places) is None
    assert questions.ends(places) == dict.fromkeys(places, 7)
    assert questions.ends([("ledger", 0)]) is None
    assert questions.ends([("ledger", 0)]) is None
