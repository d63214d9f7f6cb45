"""The rules at encode: what may travel does, and each breach names its record, its field and what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.schemas import parts, records
from headrace.schemas.checks import check_record, check_sequence, describe
from headrace.schemas.codec import decode, encode, to_plain
from headrace.schemas.errors import InvalidRecord

Make = Callable[..., parts.Sequence]
Examples = dict[str, records.Record]
BAD = [float("nan"), float("inf"), -float("inf")]


def _with(examples: Examples, name: str, **over: Any) -> Any:
    return dataclasses.replace(examples[name], **over)  # type: ignore[type-var]


@pytest.mark.parametrize("name", sorted(records.RECORD_TYPES))
def test_every_worked_example_may_travel(name: str, examples: Examples) -> None:
    check_record(examples[name])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Trajectory", "Trajectory prompt 7d0c8a3e4f2b1a90 group 5 replica 0 attempt 0 worker rollout-0"),
        ("Item", "Item prompt 7d0c8a3e4f2b1a90 policy 0 batch 3 group 5 replica 0"),
        ("Step", "Step policy 0 batch 3 version 3"),
        ("RunEnd", "RunEnd"),
    ],
)
def test_a_record_is_described_by_what_it_is_about(name: str, text: str, examples: Examples) -> None:
    assert describe(examples[name]) == text


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("Trajectory", "reward"),
        ("Member", "raw_reward"),
        ("Member", "shaped_reward"),
        ("Item", "raw_reward"),
        ("Item", "shaped_reward"),
        ("Group", "reward_mean"),
        ("Group", "reward_std"),
        ("Group", "raw_mean"),
        ("Group", "raw_std"),
        ("Step", "loss"),
        ("EvalResult", "reward"),
    ],
)
def test_numbers_that_statistics_are_made_of_must_be_finite(
    name: str, field: str, value: float, examples: Examples
) -> None:
    with pytest.raises(InvalidRecord, match=f"^{name} .*: {field} is {value}: it must be finite"):
        check_record(_with(examples, name, **{field: value}))


@pytest.mark.parametrize("value", BAD)
def test_a_named_part_of_a_reward_is_named_when_it_is_not_finite(value: float, examples: Examples) -> None:
    rewards = [parts.Reward(name="format", value=0.0), parts.Reward(name="judge", value=value)]
    with pytest.raises(InvalidRecord, match=r"rewards\[judge\] is"):
        check_record(_with(examples, "Trajectory", rewards=rewards))
    scores = [parts.MemberScore(replica=3, name="judge", value=value)]
    with pytest.raises(InvalidRecord, match=r"Score group 5 .*scores\[3\] judge is .*finite"):
        check_record(_with(examples, "Score", scores=scores))


@pytest.mark.parametrize(
    ("name", "field", "allowed"),
    [
        ("Trajectory", "status", ("train", "excluded")),
        ("Trajectory", "end_reason", records.END_REASONS),
        ("Member", "status", records.MEMBER_STATUSES),
        ("Task", "kind", records.TASK_KINDS),
        ("Closed", "reason", records.CLOSE_REASONS),
    ],
)
def test_closed_lists_take_their_entries_and_nothing_else(
    name: str, field: str, allowed: tuple[str, ...], examples: Examples
) -> None:
    for value in allowed:
        check_record(_with(examples, name, **{field: value}))
    for value in ("", allowed[0].upper(), allowed[0] + " ", "unheard-of"):
        with pytest.raises(InvalidRecord, match=f"{field} .* is none of {', '.join(allowed)}"):
            check_record(_with(examples, name, **{field: value}))


@pytest.mark.parametrize("name", ["Trajectory", "Partial", "Member", "Item"])
def test_the_sequence_that_is_wrong_is_numbered(name: str, examples: Examples, make_sequence: Make) -> None:
    broken = make_sequence(mask=np.ones(1, "uint8"))
    with pytest.raises(InvalidRecord, match=rf"^{name} .*: sequences\[1\]\.mask has 1 entries for 4 tokens"):
        check_record(_with(examples, name, sequences=[make_sequence(), broken]))


@pytest.mark.parametrize("reason", records.END_REASONS)
def test_a_sequence_may_end_for_every_reason_of_the_list(reason: str, make_sequence: Make) -> None:
    check_sequence(make_sequence(end_reason=reason))


def test_an_empty_sequence_and_one_without_trained_tokens_may_travel(make_sequence: Make) -> None:
    nothing = {name: np.empty(0, kind) for name, kind in _KINDS.items()}
    check_sequence(make_sequence(**nothing, oldest_version=-1, newest_version=-1))
    check_sequence(
        make_sequence(mask=np.zeros(4, "uint8"), versions=np.full(4, -1, "int32"), oldest_version=-1, newest_version=-1)
    )


def test_the_first_log_prob_that_is_not_finite_is_the_one_that_is_named(make_sequence: Make) -> None:
    logprobs = np.array([0, np.inf, np.nan, 0], "float32")
    with pytest.raises(InvalidRecord, match=r"logprobs\[1\] is inf"):
        check_sequence(make_sequence(logprobs=logprobs))


def test_a_masked_token_is_no_part_of_the_oldest_version(make_sequence: Make) -> None:
    versions = np.array([-1, -1, 3, 8], "int32")
    mask = np.array([0, 0, 0, 1], "uint8")
    check_sequence(make_sequence(versions=versions, mask=mask, oldest_version=8))
    with pytest.raises(InvalidRecord, match="oldest_version is 3, the tokens say 8"):
        check_sequence(make_sequence(versions=versions, mask=mask, oldest_version=3))


_KINDS = {"tokens": "int32", "logprobs": "float32", "mask": "uint8", "versions": "int32"}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.tuples(*[st.integers(0, 3)] * 4))
def test_arrays_of_one_length_are_the_only_ones_that_travel(
    sizes: tuple[int, int, int, int], make_sequence: Make
) -> None:
    arrays = {name: np.zeros(size, kind) for (name, kind), size in zip(_KINDS.items(), sizes, strict=True)}
    made = make_sequence(**arrays, oldest_version=-1)
    if len(set(sizes)) == 1:
        check_sequence(made)
    else:
        with pytest.raises(InvalidRecord, match="all four arrays must be of one length"):
            check_sequence(made)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(
            st.integers(-(2**31), 2**31 - 1),
            st.floats(allow_nan=False, allow_infinity=False, width=32),
            st.booleans(),
            st.integers(0, 2**31 - 1),
        ),
        max_size=20,
    )
)
def test_what_passes_the_check_comes_back_bit_for_bit(
    rows: list[tuple[int, float, bool, int]], examples: Examples, make_sequence: Make
) -> None:
    trained = [version for _, _, mask, version in rows if mask]
    made = make_sequence(
        tokens=np.array([row[0] for row in rows], "int32"),
        logprobs=np.array([row[1] for row in rows], "float32"),
        mask=np.array([row[2] for row in rows], "uint8"),
        versions=np.array([row[3] if row[2] else -1 for row in rows], "int32"),
        oldest_version=min(trained, default=-1),
        newest_version=max(trained, default=-1),
    )
    record = _with(examples, "Partial", sequences=[made])
    back: Any = decode(encode(record))
    for name in _KINDS:
        assert getattr(back.sequences[0], name).tobytes() == getattr(made, name).tobytes()
    assert to_plain(back) == to_plain(record)
