"""The topology as data and as a chart holds every topic, stage and operator, and nothing that is not in the map."""

from __future__ import annotations

import json
import re

import pytest

from headrace.pipeline.cli.main import main
from headrace.pipeline.flow_chart import as_data, as_mermaid
from headrace.schemas.config import OperatorConfig, RunConfig
from headrace.schemas.topics import TOPICS

CONFIG = RunConfig.model_validate(
    {
        "policies": {"main": {"model": "m"}},
        "streams": {"main": {"dataset": "d.jsonl"}},
        "operators": [{"type": "dynamic_sampling"}],
    }
)


def test_data_has_every_topic_and_stage_and_the_operators_of_a_configuration() -> None:
    data = as_data(CONFIG)
    assert [t["name"].removesuffix(".<policy>") for t in data["topics"]] == [t.name for t in TOPICS]
    assert [s["name"] for s in data["stages"]] == ["schedule", "assemble", "batch"]
    assert [o["type"] for o in data["operators"]] == ["dynamic_sampling"] and data["operators"][0]["kind"] == "filter"
    assert "operators" not in as_data()
    assert isinstance(CONFIG.operators[0], OperatorConfig)


def test_the_chart_has_an_arrow_for_each_writer_and_reader() -> None:
    chart = as_mermaid(CONFIG)
    arrows = set(re.findall(r"^  (\w+) --> (\w+)$", chart, re.M))
    expected = set()
    for topic in TOPICS:
        node = "topic_" + topic.name.replace("-", "_")
        expected |= {(w, node) for w in topic.writers} | {(node, r) for r in topic.readers}
    assert arrows == expected
    assert 'trajectory_to_group["trajectory_to_group<br/>dynamic_sampling"]' in chart
    declared = set(re.findall(r"^  (\w+)\[", chart, re.M))
    assert {end for arrow in arrows for end in arrow} <= declared


@pytest.mark.parametrize(("form", "begins"), [("mermaid", "flowchart LR"), ("json", "{"), ("text", "topics")])
def test_the_command_prints_each_form(capsys: pytest.CaptureFixture[str], form: str, begins: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["flow", "show", "--format", form])
    assert not stopped.value.code
    out = capsys.readouterr().out
    assert out.startswith(begins)
    if form == "json":
        assert json.loads(out) == as_data()
