"""Blobs: sequences through a store and back, and an object that is not what its reference says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from headrace.connectors.blobs import BlobCorrupt, array_bytes, get_sequences, put_sequences
from headrace.connectors.stores.local import LocalStore
from headrace.connectors.stores.store import NoSuchKey
from headrace.schemas import parts
from headrace.schemas.codec import encode, to_plain
from headrace.schemas.errors import InvalidRecord
from headrace.schemas.records import Partial, RunEnd


def _holder(*sequences: parts.Sequence) -> Partial:
    return Partial(group=5, replica=1, attempt=2, worker="w", incarnation=1, written_ms=1, sequences=list(sequences))


def test_sequences_come_back_as_they_were(tmp_path: Path, make_sequence: Callable[..., parts.Sequence]) -> None:
    store = LocalStore(tmp_path)
    sequences = [make_sequence(), make_sequence(policy=1)]
    reference = put_sequences(store, "first", _holder(*sequences))
    assert reference.key == "runs/first/blobs/5/1/2"
    assert reference.size == len(store.get(reference.key))
    assert to_plain(get_sequences(store, reference)) == to_plain(sequences)
    assert array_bytes(sequences) == 2 * (4 * 13 + 4)


def test_what_is_not_the_object_referred_to_is_refused(
    tmp_path: Path, make_sequence: Callable[..., parts.Sequence]
) -> None:
    store = LocalStore(tmp_path)
    reference = put_sequences(store, "first", _holder(make_sequence()))
    with pytest.raises(BlobCorrupt, match="overwritten or damaged"):
        get_sequences(store, replace(reference, size=reference.size + 1))
    with pytest.raises(BlobCorrupt, match="overwritten or damaged"):
        get_sequences(store, replace(reference, digest="0" * 32))
    with pytest.raises(NoSuchKey):
        get_sequences(store, replace(reference, key="runs/first/blobs/9/9/9"))
    others = {b"garbage": "too short|not in Confluent", encode(RunEnd(reason="r", ended_ms=1)): "holds a RunEnd"}
    for data, says in others.items():
        store.put("runs/first/other", data)
        other = parts.BlobRef(key="runs/first/other", size=len(data), digest=xxhash.xxh3_128_hexdigest(data))
        with pytest.raises(BlobCorrupt, match=says):
            get_sequences(store, other)


def test_sequences_that_may_not_travel_are_not_stored(
    tmp_path: Path, make_sequence: Callable[..., parts.Sequence]
) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(InvalidRecord):
        put_sequences(store, "first", _holder(make_sequence(end_reason="nonsense")))
    assert list(store.list("runs/")) == []
