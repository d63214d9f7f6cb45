"""Facts survive, torn ones are cut, history is folded."""

from headrace.connectors.broker.journal import Fact, Journal
from headrace.connectors.broker.storage import MemoryStorage


def _none() -> list[Fact]:
    return []


def test_facts_come_back_in_order(memory: MemoryStorage) -> None:
    journal = Journal(memory, "j", _none)
    journal.write(["a", 1])
    journal.write(["b", "ü☃\n"])
    assert Journal(memory, "j", _none).replay() == [["a", 1], ["b", "ü☃\n"]]


def test_a_torn_last_line_is_cut_and_the_next_fact_is_whole(memory: MemoryStorage) -> None:
    journal = Journal(memory, "j", _none)
    journal.write(["a"])
    memory.files["j"].data += b'["torn'
    again = Journal(memory, "j", _none)
    assert again.replay() == [["a"]]
    again.write(["b"])
    assert Journal(memory, "j", _none).replay() == [["a"], ["b"]]


def test_history_is_replaced_by_the_snapshot_only_when_it_has_grown(memory: MemoryStorage) -> None:
    state: dict[str, int] = {}
    journal = Journal(memory, "j", lambda: [["set", key, value] for key, value in state.items()], minimum=10)
    for number in range(10):
        assert not journal.rewrite_if_grown()
        state["x"] = number
        journal.write(["set", "x", number])
    assert journal.rewrite_if_grown()
    journal.write(["set", "y", 1])
    assert Journal(memory, "j", _none).replay() == [["set", "x", 9], ["set", "y", 1]]
    assert list(memory.files) == ["j"]
