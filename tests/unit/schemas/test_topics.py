"""The map of topics: counts, settings, and that every record has a place."""

import pytest

from headrace.schemas import topics
from headrace.schemas.records import RECORD_TYPES


def test_every_record_has_a_topic_and_every_topic_known_records():
    placed = {name for spec in topics.TOPICS for name in spec.records}
    assert placed == set(RECORD_TYPES)


def test_counts_of_a_run_with_two_policies():
    counts = topics.partition_counts(["a", "b"], groups=8, inboxes=64, lanes=4)
    assert counts["ledger"] == 2
    assert counts["tasks"] == 64
    assert counts["batches.a"] == counts["batches.b"] == 4
    assert counts["assemble-state-changelog"] == counts["trajectories"] == counts["admissions"] == 8
    assert counts["schedule-state-changelog"] == 1
    assert counts["batch-state-changelog"] == 2


def test_inputs_of_a_co_partitioned_sub_topology_have_equal_counts():
    counts = topics.partition_counts(["a", "b", "c"], groups=5, inboxes=64, lanes=4)
    for sub in ("assemble", "batch"):
        assert len({counts[t] for t in topics.SUB_TOPOLOGIES[sub]}) == 1


def test_settings():
    assert topics.settings_of("trajectories")["retention.ms"] == "-1"
    assert topics.settings_of("batch-state-changelog")["cleanup.policy"] == "compact"
    assert topics.settings_of("deltas")["cleanup.policy"] == "compact"
    assert "cleanup.policy" not in topics.settings_of("batches.main")


def test_unknown_topics_are_refused():
    with pytest.raises(KeyError):
        topics.spec_of("trajectory")
