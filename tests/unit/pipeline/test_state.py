"""Keys that sort by their numbers; JSON and records as values."""

from __future__ import annotations

import pytest
from stage_feed import make_prompt

from headrace.pipeline.runtime.stage import Received
from headrace.pipeline.runtime.store import MemoryStore, StoreView
from headrace.pipeline.state import (
    key_of,
    numbers_of,
    pack,
    pack_received,
    read_json,
    scan_json,
    unpack,
    unpack_received,
    write_json,
)
from headrace.schemas.codec import encode


def test_keys_sort_by_their_numbers() -> None:
    numbers = [(2, 9), (10, 0), (2, 10), (999_999_999_999, 1)]
    keys = sorted(key_of("g", *n) for n in numbers)
    assert [numbers_of(k) for k in keys] == sorted(numbers)


def test_plain_data_and_records_come_back() -> None:
    store = StoreView(MemoryStore(), b"s")
    assert read_json(store, b"none") is None
    for n in (10, 9):
        write_json(store, key_of("a", n), {"n": n})
    write_json(store, key_of("ab", 1), 1)
    assert [v for _, v in scan_json(store, "a")] == [{"n": 9}, {"n": 10}]
    note, prompt = unpack(pack(["line\nbreak", 1], make_prompt(4)))
    assert (note, prompt) == (["line\nbreak", 1], make_prompt(4))


@pytest.mark.parametrize("known", [True, False], ids=["its bytes are known", "only the record is known"])
def test_what_came_in_comes_back_with_its_place_and_time(known: bool) -> None:
    prompt = make_prompt(4)
    value = encode(prompt)
    received = Received("prompts", 3, 1 << 40, -1, prompt, len(value), value if known else b"")
    packed = pack_received(received)
    assert packed == b"prompts 3 1099511627776 -1\n" + value
    assert unpack_received(packed) == Received("prompts", 3, 1 << 40, -1, prompt)
