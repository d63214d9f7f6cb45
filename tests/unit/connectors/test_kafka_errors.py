"""Reasons of a cluster in words: the newest one, the refusal that no waiting cures, and no exception that is lost."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from headrace.connectors.kafka_errors import (
    LOGIN_CODES,
    BrokerUnreachable,
    ErrorLog,
    KafkaFailure,
    LoginRefused,
    error_of,
    explain,
)
from headrace.schemas.errors import ConfigurationError, HeadraceError

DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")
CODES = [KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN]


@pytest.mark.parametrize("code", sorted(LOGIN_CODES))
def test_a_refused_login_stays_refused_whatever_follows(code: int) -> None:
    log = ErrorLog(keep=3)
    log(KafkaError(code, "wrong password"))
    for _ in range(10):
        log(DOWN)
    assert log.last() == "_ALL_BROKERS_DOWN: 1/1 brokers are down", "the reason has left the log"
    with pytest.raises(LoginRefused, match="a:1 refuses the login: wrong password"):
        log.raise_refused("a:1")
    assert log.count == 11


@given(st.lists(st.sampled_from(CODES), max_size=30), st.integers(1, 5))
def test_the_newest_specific_reason_of_those_kept_is_told(codes: list[int], keep: int) -> None:
    log = ErrorLog(keep=keep)
    for number, code in enumerate(codes):
        log(KafkaError(code, str(number)))
    kept = list(enumerate(codes))[-keep:]
    specific = [f"{KafkaError(code).name()}: {n}" for n, code in kept if code != KafkaError._ALL_BROKERS_DOWN]
    summary = [f"_ALL_BROKERS_DOWN: {n}" for n, _ in kept]
    assert log.last() == (specific or summary or [""])[-1]
    assert log.count == len(codes)
    log.raise_refused("a:1")


def test_errors_from_many_threads_are_all_counted() -> None:
    log = ErrorLog()
    threads = [threading.Thread(target=lambda: [log(DOWN) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.count == 800


def test_what_the_client_reported_is_said_beside_a_mere_timeout() -> None:
    log = ErrorLog()
    log(KafkaError(KafkaError._RESOLVE, "kafka.example: no such host"))
    error = explain(KafkaException(KafkaError(KafkaError._TIMED_OUT, "timed out")), "listing topics", "a:1", log)
    assert type(error) is BrokerUnreachable
    assert "listing topics: no answer from the cluster at a:1" in str(error)
    assert "the client reported _RESOLVE: kafka.example: no such host" in str(error)
    same = KafkaError(KafkaError._TRANSPORT, "refused")
    repeated = ErrorLog()
    repeated(same)
    assert "the client reported" not in str(explain(KafkaException(same), "x", "a:1", repeated))


@pytest.mark.parametrize(
    "error", [KafkaException(), KafkaException("text"), ValueError("a bug"), KafkaException(5), RuntimeError()]
)
def test_an_exception_without_a_kafka_error_is_passed_on(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        error_of(error)
    assert caught.value is error
    said = explain(error, "creating topics", "a:1")
    assert type(said) is KafkaFailure
    assert type(error).__name__ in str(said)


def test_the_error_inside_an_exception_is_found() -> None:
    inner = KafkaError(KafkaError._FENCED, "fenced")
    assert error_of(KafkaException(inner)) is inner


def test_only_what_a_person_must_change_is_a_configuration_error() -> None:
    """A supervisor gives up at once on those, and starts the others again."""
    assert issubclass(LoginRefused, ConfigurationError)
    assert not issubclass(BrokerUnreachable, ConfigurationError)
    assert issubclass(BrokerUnreachable, KafkaFailure)
    assert issubclass(KafkaFailure, HeadraceError)
