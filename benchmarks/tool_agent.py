"""An agent program around OpenAI's client is trained as it is: recipes/tool_agent, and every token looked at again.

The program calls a tool and its model's template drops the thinking of earlier answers, so the history that it sends
back is not what was sampled. A whole run on the local broker, then the check from outside: for every sequence that was
trained, the weights of its version are rebuilt from the store and a float32 forward over its tokens must give every
trained token the log-prob that was recorded, which it has in no other context. Needs the package `openai`. Three to ten
minutes, most of it the start of the program's processes; `--quick` trains two versions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.form import Figure, main
from headrace.connectors.kafka import Connection
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.image import load_image
from headrace.connectors.stores.open import open_store
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.launch.local_broker import broker_of
from headrace.pipeline.run_records import read_records
from headrace.pipeline.verify import verify_run
from headrace.schemas.config import RunConfig
from headrace.schemas.parts import Sequence
from headrace.schemas.records import Item, Step, Trajectory

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tool_agent" / "run.toml"
NEAR = 1e-3
"""A forward over the whole sequence and one over a token at a time differ by less in float32."""


def run(parent: Path, versions: int) -> RunFolder:
    """The recipe to its end."""
    headrace = str(Path(sys.executable).with_name("headrace"))
    words = [f"run.folder={parent}", "run.id=agent", f"trainer.max_steps={versions}"]
    done = subprocess.run([headrace, "run", "@", str(RECIPE), *words], stdout=subprocess.PIPE, text=True)
    sys.stderr.write(done.stdout[-2000:])
    done.check_returncode()
    return RunFolder(parent / "agent")


class Looked:
    """Trained tokens that were looked at: how many, how many are wrong, the largest difference."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self.tokens, self.wrong, self.worst, self.mixed = 0, 0, 0.0, 0
        self._chain = Chain(open_store(config.store, folder.path), config.run.id, "main")
        self._model = config.policies["main"].model
        self._version = -1

    def look(self, sequence: Sequence) -> None:
        """Compare the trained tokens of a sequence with a forward of their version."""
        import torch

        trained = sequence.mask[1:] == 1
        versions = set(sequence.versions[1:][trained].tolist())
        if not versions:
            return
        self.mixed += len(versions) > 1
        self._load(max(versions))
        ids = torch.from_numpy(sequence.tokens.astype(np.int64))
        with torch.inference_mode():
            logp = torch.log_softmax(self._network(ids[None]).logits[0, :-1].float(), -1)
        found = logp.gather(1, ids[1:, None])[:, 0].numpy()
        apart = np.abs(found - sequence.logprobs[1:])[trained]
        self.tokens += apart.size
        self.wrong += int((apart > NEAR).sum())
        self.worst = max(self.worst, float(apart.max()))

    def _load(self, version: int) -> None:
        if version == self._version:
            return
        import torch
        from transformers import AutoModelForCausalLM

        image = load_image(self._chain, version)
        bits = image.layout.views(image.data)
        self._network = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in self._network.named_parameters():
                parameter.copy_(torch.from_numpy(bits[name].view(np.int16).copy()).view(torch.bfloat16))
        self._version = version


def looked_at(folder: RunFolder) -> Iterator[Figure]:
    """The figures, from the topics and the store of the run."""
    config = folder.read_config()
    with broker_of(folder) as address:
        connection = Connection.of(config.kafka, config.run.id, address)
        made = [r for _, r in read_records(connection, "trajectories") if isinstance(r, Trajectory)]
        items = [r for _, r in read_records(connection, "batches.main") if isinstance(r, Item)]
        steps = [r for _, r in read_records(connection, "steps") if isinstance(r, Step) and r.tokens]
        proofs = verify_run(folder, config, address)
    usable = [one for one in made if one.status == "train"]
    trained = {(item.group, item.replica) for item in items}
    yield Figure("versions", len(steps), "")
    yield Figure("episodes", len(made), "", anchor="conversations of two questions, each a process of its own")
    yield Figure("episodes_failed", len(made) - len(usable), "", anchor="the program or the server failed")
    yield Figure("calls_per_episode", fmean(one.metrics["calls"] for one in usable))
    yield Figure("tool_calls_share", _called(usable), "", anchor="episodes in which the tool was called")
    yield Figure("sequences_per_trajectory", fmean(one.metrics["sequences_per_trajectory"] for one in usable))
    yield Figure("reward_first", steps[0].metrics["reward/raw_mean"], "", anchor="mean over the first batch")
    yield Figure("reward_last", steps[-1].metrics["reward/raw_mean"], "", anchor="mean over the last batch")
    looked = Looked(folder, config)
    for one in sorted(usable, key=lambda t: max((s.newest_version for s in t.sequences), default=0)):
        if (one.group, one.replica) in trained:
            for sequence in one.sequences:
                looked.look(sequence)
    yield Figure("trained_tokens", looked.tokens, "", anchor="looked at again, one by one")
    yield Figure("sequences_mixed", looked.mixed, "", 0, False, "with tokens of several versions, at depth 0")
    yield Figure("wrong_tokens", looked.wrong, "", 0, False, f"log-prob off by more than {NEAR:g}")
    yield Figure("largest_difference", looked.worst)
    breaches = sum(len(proof.breaches) for proof in proofs)
    yield Figure("verify_breaches", breaches, "", 0, False, "of `headrace verify`")


def _called(usable: list[Trajectory]) -> float:
    """Share of episodes with a turn between two replies, beyond the one that the second question is."""
    return fmean(one.metrics["calls"] > 2 for one in usable)


def measure(given: argparse.Namespace) -> Iterator[Figure]:
    """The run and the look."""
    with tempfile.TemporaryDirectory() as parent:
        yield from looked_at(run(Path(parent), 2 if given.quick else 12))


if __name__ == "__main__":
    main(__doc__, measure)
