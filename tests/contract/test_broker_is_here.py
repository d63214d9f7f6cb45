"""Says once, where it is so, that the suite ran on the local broker alone."""

import os

import pytest


def test_apache_kafka_takes_part() -> None:
    if not (os.environ.get("HEADRACE_KAFKA_LIBS") or os.environ.get("HEADRACE_KAFKA_BOOTSTRAP")):
        pytest.skip(
            "contract suite on the local broker only: set HEADRACE_KAFKA_LIBS to the libs folder of an unpacked "
            "Apache Kafka 4 (Java 17), or HEADRACE_KAFKA_BOOTSTRAP to a running cluster"
        )
