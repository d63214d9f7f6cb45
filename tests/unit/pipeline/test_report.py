"""Figures of a report are worked out as they are defined, and the page holds them without markup of strangers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_facts import step, whole_run
from stage_feed import make_prompt

from headrace.pipeline.evaluated import Best
from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.pipeline.launch.folder import RunFolder, Session
from headrace.pipeline.prompt_overlap import PromptOverlap
from headrace.pipeline.report import Figures, build_figures, loop_latencies_ms, time_split
from headrace.pipeline.report_html import bar_chart, line_chart, page
from headrace.pipeline.run_records import TrajectoryHead
from headrace.pipeline.tally import Tally
from headrace.schemas.config import PolicyConfig, RunConfig, RunSection, StreamConfig
from headrace.schemas.records import EvalResult


def head(group: int, started_ms: int, finished_ms: int, *, status: str = "train", error: str = "") -> TrajectoryHead:
    return TrajectoryHead(
        group=group, replica=0, attempt=0, worker="w", status=status, end_reason="stop", reward=1.0, tokens=5,
        started_ms=started_ms, finished_ms=finished_ms, error=error, prompt_text="p", completion_text="c",
    )  # fmt: skip


def figures(tmp_path: Path, depth: float = 0.0) -> Figures:
    config = RunConfig(
        run=RunSection(id="r", folder=str(tmp_path)), policies={"main": PolicyConfig(model="m", depth=depth)},
        streams={"main": StreamConfig(dataset="d")},
    )  # fmt: skip
    folder = RunFolder.of(config)
    folder.create()
    for peak in (100, 300):
        folder.add_session(
            Session(
                started=0,
                wall_seconds=10,
                peak_memory_bytes=peak,
                memory_kind="pss",
                outcome="finished",
                command="headrace run @ <x>",
            )
        )
    facts, tally = whole_run(), Tally()
    for record in (*facts.ledger[0], *facts.manifests[0], *facts.steps[0]):
        tally.fold(record)
    for version, reward, text in ((0, 0.0, "<script>"), (2, 1.0, "ok")):
        tally.fold(
            EvalResult(
                policy=0,
                suite="heldout",
                prompt_id="p",
                replica=0,
                version=version,
                oldest_version=version,
                newest_version=version,
                reward=reward,
                tokens=3,
                end_reason="stop",
                finished_ms=1,
                prompt_text="21=",
                completion_text=text,
            )
        )
    heads = [
        head(3, 1100, 1400),
        head(4, 1200, 1600),
        head(0, 0, 500),
        head(9, 0, 0, status="excluded", error="boom\n2"),
    ]
    overlap = PromptOverlap()
    overlap.fold(make_prompt(1, EVALUATION_STREAM))
    return build_figures(folder, config, tally, heads, 1, overlap)


def test_figures_follow_their_definitions(tmp_path: Path) -> None:
    f = figures(tmp_path)
    assert (f.accuracy_start, f.accuracy_final, f.eval_samples) == (0.0, 1.0, 1)
    assert (f.wall_seconds, f.peak_memory_bytes, f.memory_kind) == (20.0, 300, "pss")
    assert (f.groups_opened, f.groups_trained, f.rollouts, f.versions) == (5, 4, 4, 2)
    assert (f.mean_staleness, f.max_staleness) == (0.5, 1)
    assert f.trained_tokens == 16 and f.seconds_per_million_tokens == 20 / 16e-6
    assert f.drops == {"filtered": 1} and f.excluded == {"stop: boom": 1} and f.dead_letters == 1
    assert f.curves.accuracy == [(0, 0.0), (2, 1.0)]
    assert f.evaluation is not None and f.evaluation.best == Best(2, "avg", 1.0)
    assert f.evaluation == f.policies[0].evaluation
    assert f.overlap is not None and (f.overlap.held_out, f.overlap.shared) == (1, 0)


def test_loop_latency_is_what_neither_trainer_nor_rollout_used(tmp_path: Path) -> None:
    # Steps end at 1000 and 2000 ms; the second trained for 250 ms, its rollouts lasted from 1100 to 1600 ms.
    assert figures(tmp_path).loop_latency_ms == pytest.approx(1000 - 250 - 500)
    assert figures(tmp_path / "deep", depth=1.0).loop_latency_ms is None


def test_batches_without_their_rollouts_give_no_latency() -> None:
    assert loop_latencies_ms([step(1, 1), step(2, 2)], {}, []) == []


def test_time_split_adds_up() -> None:
    split = time_split([step(1, 1), step(2, 2), step(3, 3)])
    assert split == {"wait_for_batch": 0.1, "step": 0.2, "publish": 0.05, "other": pytest.approx(0.65)}
    assert time_split([step(1, 1)]) == {}


def test_the_json_twin_can_be_read_again(tmp_path: Path) -> None:
    f = figures(tmp_path)
    again = json.loads(json.dumps(f.flat()))
    names = {"accuracy_start", "accuracy_final", "wall_seconds", "peak_memory_bytes", "groups_trained", "rollouts"}
    assert names | {"mean_staleness", "loop_latency_ms", "seconds_per_million_tokens"} <= again.keys()


def test_the_page_stands_alone_and_escapes_what_models_wrote(tmp_path: Path) -> None:
    text = page(figures(tmp_path))
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "headrace run @ &lt;x&gt;" in text
    assert not re.search(r"(?:src|href)=", text)
    for svg in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(svg.replace("role=img", 'role="img"'))


def test_charts_without_data_say_so() -> None:
    assert "no data" in line_chart("t", {"a": []}) and "none" in bar_chart("t", {})
    assert "polyline" in line_chart("t", {"a": [(1, 0.0)]})
