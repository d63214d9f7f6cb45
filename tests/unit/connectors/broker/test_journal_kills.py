"""A journal that is killed at any write, also in the middle of a rewrite, says the whole truth after it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.connectors.broker.journal import Fact, Journal
from headrace.connectors.broker.storage import MemoryStorage, StorageError

JSON = st.none() | st.integers() | st.text(max_size=8) | st.lists(st.text(max_size=4), max_size=3)


class Register:
    """The smallest owner of a journal: values by name."""

    def __init__(self, storage: MemoryStorage) -> None:
        self.values: dict[str, int] = {}
        self.journal = Journal(storage, "j", self._snapshot, minimum=5)
        for name, value in self.journal.replay():
            self.values[name] = value

    def _snapshot(self) -> Iterable[Fact]:
        return [[name, value] for name, value in self.values.items()]

    def set(self, name: str, value: int) -> None:
        """Durable when it returns."""
        self.journal.write([name, value])
        self.values[name] = value
        self.journal.rewrite_if_grown()


def test_a_kill_at_every_write_keeps_all_that_was_acknowledged(
    killable: MemoryStorage, killed: type[BaseException]
) -> None:
    for kill_at in range(1, 60):
        storage = type(killable)()
        register, acknowledged = Register(storage), {}
        storage.kill_at = kill_at  # type: ignore[attr-defined]
        tried: tuple[str, int] | None = None
        try:
            for number in range(40):
                tried = "abc"[number % 3], number
                register.set(*tried)
                acknowledged[tried[0]] = number
        except killed:
            pass
        storage.kill_at = None  # type: ignore[attr-defined]
        found = Register(storage).values
        allowed = [acknowledged] if tried is None else [acknowledged, {**acknowledged, tried[0]: tried[1]}]
        assert found in allowed, f"killed at write {kill_at}"
        again = Register(storage)
        again.set("z", 1)
        assert Register(storage).values == {**found, "z": 1}


@given(st.lists(st.lists(JSON, min_size=1, max_size=3), max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_fact_comes_back(facts: list[Fact]) -> None:
    storage = MemoryStorage()
    journal = Journal(storage, "j", list)
    for fact in facts:
        journal.write(fact)
    assert Journal(storage, "j", list).replay() == facts


@pytest.mark.parametrize("text", ["\u2028\u2029\x85", "\r\n", "\x1c\x1d", "a\ud800b", "\\n"])
def test_text_with_line_ends_and_lone_surrogates_is_one_fact(text: str) -> None:
    storage = MemoryStorage()
    Journal(storage, "j", list).write(["set", text])
    assert Journal(storage, "j", list).replay() == [["set", text]]


def test_a_refused_write_leaves_no_part_of_itself_behind() -> None:
    storage = MemoryStorage()
    journal = Journal(storage, "j", list)
    journal.write(["a"])
    storage.files["j"].limit = len(storage.files["j"].data) + 3
    with pytest.raises(StorageError):
        journal.write(["something longer"])
    storage.files["j"].limit = None
    journal.write(["b"])
    assert Journal(storage, "j", list).replay() == [["a"], ["b"]]
