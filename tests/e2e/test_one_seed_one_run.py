"""At depth 0 one seed gives one run, and no token is stale: the same tokens and batches, whatever the timing was."""

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recipe_run import HEADRACE, RECIPE, ROOT, reported, verified

from headrace.connectors.kafka import Connection
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.launch.local_broker import broker_of
from headrace.schemas.codec import encode
from headrace.schemas.records import Item

STEPS = 3
SHORT = (
    "policies.main.depth=0", "trainer.backend=torch", f"trainer.max_steps={STEPS}", "trainer.batch_groups=4",
    "eval.dataset=", "eval.every=0",
)  # fmt: skip
EVALUATED = (f"eval.dataset={ROOT / 'recipes/sort_digits/eval.jsonl'}", "eval.every=2", "eval.limit=8")
pytestmark = pytest.mark.timeout(600)


def items_of(folder: Path) -> list[Item]:
    """The items of all trained batches in the order of lanes, without the places that they were made from.

    Rollout goes on until the run has ended: a batch that nobody trains may be whole by then, and may not be.
    """
    run = RunFolder.existing(folder)
    with broker_of(run) as address:
        connection = Connection.of(run.read_config().kafka, folder.name, address)
        items = [raw.decoded() for raw in connection.read_topic("batches.main")]
    placed = {
        (item.batch, item.lane, item.index): replace(item, sources=[])
        for item in items
        if isinstance(item, Item) and item.batch <= STEPS
    }
    return [item for _, item in sorted(placed.items())]


def without_logprobs(item: Item) -> bytes:
    """All that a sampled item is but for the log-probs."""
    bare = [replace(one, logprobs=np.zeros_like(one.logprobs)) for one in item.sequences]
    return encode(replace(item, sequences=bare))


def weights_of(folder: Path) -> np.ndarray:
    return np.frombuffer((folder / "model" / "main" / "model.safetensors").read_bytes(), np.uint8)


@pytest.mark.parametrize(
    "filters", [("operators=[]",), ("policies.main.exact_refill=true",)], ids=["no filter", "dynamic sampling"]
)
def test_one_seed_gives_one_run(tmp_path: Path, warm: Path, filters: tuple[str, ...]) -> None:
    """Two runs, the second with fewer slots, two workers and evaluations: other timing, other places, equal data."""
    for name, more in (("one", ()), ("two", ("rollout.slots=24", "rollout.workers=2", *EVALUATED))):
        own = (f"run.folder={tmp_path}", f"run.id={name}", f"policies.main.model={warm}")
        words = [HEADRACE, "run", "@", ROOT / RECIPE, *own, *SHORT, *filters, *more]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    first, second = (items_of(tmp_path / name) for name in ("one", "two"))
    assert len(first) == len(second) == STEPS * 4 * 8
    assert [without_logprobs(item) for item in first] == [without_logprobs(item) for item in second]
    for one, other in zip(first, second, strict=True):
        for mine, theirs in zip(one.sequences, other.sequences, strict=True):
            # Products of matrices of another height are rounded otherwise.
            assert np.abs(mine.logprobs - theirs.logprobs).max() < 1e-5
    a, b = (weights_of(tmp_path / name) for name in ("one", "two"))
    assert (a != b).mean() < 1e-3
    figures = reported(tmp_path / "two")
    assert figures["max_staleness"] == 0 and figures["loop_latency_ms"] is not None
    assert "staleness is at most 0" in verified(tmp_path / "two")
