"""Ranks of a trainer as torchrun and the deepspeed launcher start them: every batch becomes a version, all end."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_feed import Feed, local_broker, make_config, make_model, trainer_arguments

from headrace.connectors.kafka import Connection
from headrace.schemas.records import Step, Stop


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "headrace.trainers"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--module", "headrace.trainers"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_that_a_launcher_starts_train_every_batch(tmp_path: Path, launcher: str) -> None:
    model = make_model(tmp_path / "m")
    stage = 2 if launcher == "deepspeed" else 0
    backend = "deepspeed" if launcher == "deepspeed" else "torch"
    port = [] if launcher == "torchrun" else ["--master_port", str(free_port())]
    config = make_config(model, tmp_path, f"by-{launcher}", backend=backend, zero_stage=stage, ranks=2)
    with local_broker(tmp_path / "broker") as address:
        fed = Feed(Connection.of(config.kafka, config.run.id, address), config)
        for batch in (1, 2):
            fed.batch(batch, lanes=[0, 2, 3])
        fed.end()
        done = subprocess.run(
            [*LAUNCHERS[launcher][:-1], *port, LAUNCHERS[launcher][-1], *trainer_arguments(config, address)],
            cwd=tmp_path,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        steps = fed.records("steps")
        assert [r.version for r in steps if isinstance(r, Step)] == [1, 2]
        assert isinstance(steps[-1], Stop)
        assert all(r.wait_seconds >= 0 and r.step_seconds > 0 for r in steps if isinstance(r, Step))
