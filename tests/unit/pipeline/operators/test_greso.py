"""GRESO by the values of both codes that it comes from, and where it differs from them on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prompt_feed import PromptFeed, make_offer
from pydantic import ValidationError
from stage_feed import make_config

from headrace.pipeline import flow
from headrace.pipeline.operators import greso
from headrace.pipeline.operators.greso import PRESETS, Greso, GresoConfiguration, near_first
from headrace.pipeline.operators.prompt_operator import draw
from headrace.schemas.errors import ConfigurationError

DATA: dict[str, Any] = json.loads((Path(__file__).parents[3] / "oracles" / "astraflow_greso.json").read_text())


def feed(**settings: Any) -> PromptFeed:
    return PromptFeed(Greso, GresoConfiguration(**settings))


def streak(made: PromptFeed, name: str) -> tuple[str, int]:
    found: tuple[str, int] = made.operator.streak(make_offer(name))
    return found


def kept_with(made: PromptFeed, name: str) -> float:
    return float(made.operator.keep_probability(*streak(made, name))) if streak(made, name)[0] else 1.0


def window(made: PromptFeed, easy: int, hard: int, mixed: int) -> tuple[float, float]:
    """Groups of so many prompts, then a version."""
    for kind, count, rewards in (("e", easy, (1, 1)), ("h", hard, (0, 0)), ("m", mixed, (0, 1))):
        for number in range(count):
            made.learn(f"{kind}{number}", rewards)
    made.operator.moved(1, made)
    return made.operator.state.p_easy, made.operator.state.p_hard


# ---------------------------------------------------------------------------------------------------- AstraFlow's form


def test_a1_history_of_verdicts_and_tallies() -> None:
    made = feed(preset="astraflow")
    seen = []
    for name, rewards in [
        ("A", [1, 1, 1, 1]), ("A", [1, 1, 1, 1]), ("A", [0, 0, 0, 0]), ("A", [0, 0, 0, 0]), ("A", [0, 1, 0, 0]),
        ("A", [1, 1, 1, 1]), ("B", [0.5] * 4), ("C", [0.2, 0.2]), ("D", [1.0]), ("E", [1, 1.000001]), ("F", [0.6, 0.6]),
    ]:  # fmt: skip
        made.learn(name, rewards)
        seen.append(streak(made, name))
    easy, hard = "easy", "hard"
    assert seen == [
        (easy, 1), (easy, 2), (hard, 1), (hard, 2), ("", 0), (easy, 1), (hard, 1), (hard, 1), (easy, 1), (easy, 1),
        (easy, 1),
    ]  # fmt: skip
    state = made.operator.state
    assert (state.easy, state.hard, state.total) == (6, 4, 11)
    made.move()
    assert (state.p_easy, state.p_hard, state.easy, state.hard, state.total) == (0.5, 0.5, 0, 0, 0)
    assert (state.ratio_easy, state.ratio_hard) == (pytest.approx(6 / 11), pytest.approx(4 / 11))


@pytest.mark.parametrize(
    ("preset", "verdict", "expected"),
    [
        ("astraflow", "easy", [0.5, 0.25, 0.125, 0.1, 0.1]),
        ("paper", "easy", [0.5, 0.25, 0.125, 0.0625, 0.05]),
        ("astraflow", "hard", [0.5, 0.4, 0.4, 0.4, 0.4]),
        ("paper", "hard", [0.5, 0.3, 0.3, 0.3, 0.3]),
    ],
)
def test_a1_probabilities_at_one_half(preset: Any, verdict: str, expected: list[float]) -> None:
    operator = Greso(GresoConfiguration(preset=preset))
    assert [operator.keep_probability(verdict, z) for z in range(1, 6)] == expected


def test_a1_draws_keep_as_often_as_they_say() -> None:
    made = feed(preset="astraflow", max_skips=0)
    for _ in range(2):
        made.learn("p", [1, 1])
    kept = sum(made.offer("p", position) == "" for position in range(20_000))
    assert kept / 20_000 == pytest.approx(0.25, abs=0.01)


def test_a2_adaptation() -> None:
    made = feed(preset="astraflow", warm_up=0)
    expected = [
        ((10, 10, 80), (0.49, 0.51)),
        ((5, 20, 75), (0.50, 0.50)),
        ((0, 0, 100), (0.51, 0.51)),
        ((83, 167, 750), (0.50, 0.50)),
        ((82, 166, 752), (0.51, 0.51)),
        ((1, 0, 0), (0.50, 0.52)),
        ((0, 1, 0), (0.51, 0.51)),
    ]
    for counts, ps in expected:
        assert window(made, *counts) == (pytest.approx(ps[0]), pytest.approx(ps[1])), counts
    before = made.operator.state.ratio_hard
    assert window(made, 0, 0, 0) == (pytest.approx(0.51), pytest.approx(0.51))
    assert made.operator.state.ratio_hard == before == 1.0, "an empty window leaves everything"


def test_a2_sixty_easy_windows_reach_the_bounds() -> None:
    made = feed(preset="astraflow", warm_up=0)
    ps = [window(made, 1, 0, 0) for _ in range(60)]
    assert ps[0][0] == 0.49
    assert ps[9][0] == 0.3999999999999999
    assert ps[48][0] == ps[59][0] == 0.01
    assert ps[59][1] == 0.99


def test_a3_seeded_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = feed(preset="astraflow")
    for name, rewards, times in (("E", [1, 1], 2), ("H", [0, 0], 3)):
        for _ in range(times):
            made.learn(name, rewards)
    drawn = [
        (0.966454, False), (0.440733, False), (0.007491, True), (0.910976, False), (0.939269, False),
        (0.582228, False), (0.671563, False), (0.083938, True), (0.766481, False), (0.236810, True),
        (0.030814, True), (0.788773, False),
    ]  # fmt: skip
    for number, (u, admitted) in enumerate(drawn):
        monkeypatch.setattr(greso, "draw", lambda *_, u=u: u)
        assert (made.offer("EH"[number % 2]) == "") is admitted, u


def test_a4_closed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DATA["greso_astraflow_closed_loop"]
    params = {k: data["params"][k] for k in ("min_submit_easy", "min_submit_hard")}
    made = feed(floor_easy=params["min_submit_easy"], floor_hard=params["min_submit_hard"], warm_up=1_000_000)
    script = {name: iter(rewards) for name, rewards in data["script"].items()}
    for expected in data["windows"]:
        made.operator.state.armed = expected["window"] >= data["armed_before_version"]
        for decision in expected["decisions"]:
            name = decision["q"]
            assert streak(made, name) == (decision["kind"] or "", decision["z"])
            monkeypatch.setattr(greso, "draw", lambda *_, u=decision["u"]: u)
            assert (made.offer(name) == "") is decision["submit"], (expected["window"], name)
            if decision["submit"]:
                made.learn(name, next(script[name]))
        made.operator.moved(expected["window"], made)
        state = made.operator.state
        assert (state.p_easy, state.p_hard) == (expected["p_easy"], expected["p_hard"])
        assert (state.ratio_easy, state.ratio_hard) == (expected["easy_ratio"], expected["hard_ratio"])
        assert {name: streak(made, name)[1] for name in script} == expected["streak"]
        made.restart()


def test_warm_up_counts_what_is_offered_after_the_first_version() -> None:
    made = feed(preset="astraflow", warm_up=3)
    for position in range(4):
        made.offer("p", position)
    made.move()
    armed = []
    for position in range(4, 7):
        made.offer("p", position)
        made.restart()
        armed.append(made.operator.state.armed)
    assert armed == [False, False, True]


def test_without_a_number_the_warm_up_is_the_first_epoch() -> None:
    made = feed()
    made.offer(make_offer("p", 0, epoch=1))
    assert not made.operator.state.armed, "nothing has been trained yet"
    made.move()
    made.offer(make_offer("p", 1, epoch=0))
    assert not made.operator.state.armed
    made.offer(make_offer("p", 2, epoch=1))
    assert made.operator.state.armed
    assert window(made, 1, 0, 0) == (0.49, 0.51)


@pytest.mark.parametrize(
    ("rewards", "alike"),
    [
        ([1, 1.000009], True),
        ([1, 1.00002], False),
        ([0, 1e-8], True),
        ([0, 2e-8], False),
        ([1, 1.000009, 0.999991], True),
        ([], False),
    ],
)
def test_no_variance_by_closeness_to_the_first(rewards: list[float], alike: bool) -> None:
    assert near_first(rewards) is alike


# ---------------------------------------------------------------------------------------------------- the repository's


def repo(**settings: Any) -> PromptFeed:
    return feed(preset="greso_repo", max_skips=0, **settings)


def means(made: PromptFeed, name: str, history: list[float]) -> None:
    for mean in history:
        made.learn(name, [mean, mean])


SHARES = [0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375, 0.99]


@pytest.mark.parametrize(
    ("history", "easy", "hard"),
    [
        *(([1.0] * (z + 1), share, 0.0) for z, share in enumerate(SHARES)),
        *(([0.1] * (z + 1), 0.0, share) for z, share in enumerate(SHARES)),
        ([1, 1, 0.9], 0, 0), ([0.1, 0.1, 1], 0.5, 0), ([0.98], 0.5, 0), ([0.979], 0, 0), ([0.11], 0, 0.5),
        ([0.111], 0, 0), ([1, 0.1, 1], 0.5, 0), ([0.9, 1, 1], 0.75, 0),
    ],
)  # fmt: skip
def test_g1_skip_probabilities(history: list[float], easy: float, hard: float) -> None:
    made = repo()
    means(made, "p", history)
    verdict, _ = streak(made, "p")
    skipped = 1 - kept_with(made, "p")
    assert (skipped if verdict == "easy" else 0.0) == pytest.approx(easy, abs=1e-12)
    assert (skipped if verdict == "hard" else 0.0) == pytest.approx(hard, abs=1e-12)


@pytest.mark.parametrize(("p", "z", "skip"), [(0.05, 1, 0.95), (0.05, 2, 0.99), (0.05, 9, 0.99), (0.95, 5, 0.226219)])
def test_g1_other_p(p: float, z: int, skip: float) -> None:
    operator = Greso(GresoConfiguration(preset="greso_repo", p_easy=p))
    assert 1 - operator.keep_probability("easy", z) == pytest.approx(skip, abs=1e-6)


@pytest.mark.parametrize(
    ("before", "easy", "hard", "total", "armed", "after"),
    [
        ((0.5, 0.5), 100, 100, 1000, True, (0.49, 0.51)),
        ((0.5, 0.5), 50, 200, 1000, True, (0.51, 0.49)),
        ((0.5, 0.5), 1, 2, 12, True, (0.49, 0.49)),
        ((0.05, 0.05), 1000, 0, 1000, True, (0.05, 0.06)),
        ((0.95, 0.95), 0, 0, 1000, True, (0.95, 0.95)),
        ((0.055, 0.945), 1000, 0, 1000, True, (0.05, 0.95)),
        ((0.5, 0.5), 300, 300, 1000, False, (0.5, 0.5)),
        ((0.5, 0.5), 0, 0, 0, True, (0.5, 0.5)),
    ],
)
def test_g2_adaptation(
    before: tuple[float, float], easy: int, hard: int, total: int, armed: bool, after: tuple[float, float]
) -> None:
    made = repo()
    state = made.operator.state
    state.p_easy, state.p_hard, state.armed = *before, armed
    state.easy, state.hard, state.total = easy, hard, total
    made.operator.moved(1, made)
    assert (state.p_easy, state.p_hard) == (pytest.approx(after[0]), pytest.approx(after[1]))


def test_g2_tallies_are_groups_of_exact_rewards() -> None:
    made = repo()
    for rewards in ([1, 1], [1, 0.99], [0.1, 0.1], [0, 0], [0.5, 0.5]):
        made.learn("p", rewards)
    assert (made.operator.state.easy, made.operator.state.hard, made.operator.state.total) == (1, 1, 5)
    assert Greso(GresoConfiguration(preset="greso_repo", hard_reward=0.0)).judged([0, 0]) == ("hard", "hard")


def test_g4_seeded_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference draws one number for a prompt with history, and a second when its last mean is hard."""
    torch = pytest.importorskip("torch")
    data = DATA["greso_repo_filter_seed0"]
    made = repo()
    for name, history in data["traces"].items():
        means(made, name, history)
    torch.manual_seed(0)
    for expected in data["passes"]:
        codes = []
        for name, history in data["traces"].items():
            drawn = [float(torch.rand(1)) for _ in range(bool(history) + bool(history and history[-1] <= 0.11))]
            monkeypatch.setattr(greso, "draw", lambda _, __, number, drawn=drawn: drawn[number])
            codes.append(["probably_easy", "probably_hard", ""].index(made.offer(name)))
        assert [[f"s_{name}", code] for name, code in zip(data["traces"], codes, strict=True)] == expected["log"]
        assert [name for name, code in enumerate(codes) if code == 2] == expected["kept"]


# ---------------------------------------------------------------------------------------------------- our own choices


def test_draws_are_a_function_of_seed_prompt_and_attempt() -> None:
    prompt = make_offer("p", 7).prompt
    assert draw(0, prompt) == draw(0, make_offer("p", 7).prompt)
    others = {
        draw(1, prompt),
        draw(0, prompt, 1),
        draw(0, make_offer("q", 7).prompt),
        draw(0, make_offer("p", 8).prompt),
    }
    assert len(others | {draw(0, prompt)}) == 5
    assert all(0 <= u < 1 for u in others)


def test_incomplete_groups_and_unknown_rewards_teach_nothing() -> None:
    made = feed()
    made.learn("p", [1, 1], complete=False)
    made.learn("p", [])
    made.learn("p", [1, float("nan")])
    assert streak(made, "p") == ("", 0) and made.operator.state.total == 0
    assert made.metrics.total("outcomes_ignored") == 3


@pytest.mark.parametrize(("counted", "expected"), [(True, 0.5**3), (False, 0.5)])
def test_open_groups_of_the_prompt_count_as_more_of_the_same(counted: bool, expected: float) -> None:
    made = feed(count_in_flight=counted, max_skips=0)
    made.learn("p", [1, 1])
    kept = sum(made.offer(make_offer("p", n, in_flight=2)) == "" for n in range(4000))
    assert kept / 4000 == pytest.approx(expected, abs=0.03)
    assert made.offer(make_offer("unseen", in_flight=5)) == "", "nothing says what it will bring"


def test_everything_learned_survives_a_restart_at_every_record() -> None:
    def play(restarts: bool) -> list[Any]:
        made = feed(warm_up=2, remember=5)
        out: list[Any] = []
        for n in range(60):
            out.append(made.offer(f"p{n % 7}", n))
            made.learn(f"p{n % 7}", [(n % 7) % 3 > 0, (n % 7) % 3 > 1])
            if n % 5 == 4:
                made.operator.moved(n, made)
            if restarts:
                made.restart()
        return [*out, dict(made.store().scan())]

    assert play(True) == play(False)


def test_restored_p_are_brought_within_their_bounds() -> None:
    made = feed(warm_up=0)
    for _ in range(30):
        window(made, 1, 0, 0)
    made._make = lambda: Greso(GresoConfiguration(p_low=0.4, p_high=0.6))
    made.restart()
    assert (made.operator.state.p_easy, made.operator.state.p_hard) == (0.4, 0.6)


def test_memory_is_bounded() -> None:
    made = feed(remember=3)
    for n in range(10):
        made.learn(f"p{n}", [1, 1])
    assert [streak(made, f"p{n}")[1] for n in (6, 7, 9)] == [0, 1, 1]
    assert len(list(made.store().scan(b"prompt/"))) == 3


def test_keys_go_before_the_preset() -> None:
    constants = GresoConfiguration(preset="astraflow", floor_hard=0.2, p_easy=0.7).constants()
    assert (constants.floor_easy, constants.floor_hard, constants.p_easy) == (0.10, 0.2, 0.7)
    assert GresoConfiguration().constants() == PRESETS["paper"]


def test_what_cannot_work_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match=r"operators\[0\] \(greso\): greso judges .*group_size is 1"):
        flow.validate(make_config(operators=[{"type": "greso"}], group_size=1))
    flow.validate(make_config(operators=[{"type": "greso", "preset": "greso_repo"}], group_size=1))
    with pytest.raises(ConfigurationError, match=r"operators\[1\] \(greso, prompt\) stands after dynamic_sampling"):
        flow.validate(make_config(operators=[{"type": "dynamic_sampling"}, {"type": "greso"}]))
    with pytest.raises(ConfigurationError, match=r"p_low 0\.8 is above p_high 0\.2"):
        Greso(GresoConfiguration(p_low=0.8, p_high=0.2))
    with pytest.raises(ValidationError, match="preset"):
        GresoConfiguration(preset="unknown")
