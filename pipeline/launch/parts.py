"""Which processes a run consists of, and with which command and environment each is started.

A pure function of the configuration; the supervisor turns parts into processes. Names of parts are the instance names
of protocol 2: a part that is started again takes over where it was.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.schemas.config import RunConfig, TrainerConfig

__all__ = ("Part", "Rollback", "broker_part", "log_trainer_part", "parts_of")

_ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
"""Defaults for every part: one thread, nothing from the network, logs as they come. A person's own settings win."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One supervised process. ``role``: broker, operators, source, rollout, trainer or upkeep."""

    name: str
    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def full_environment(self) -> dict[str, str]:
        """This process's environment over the defaults, the part's own settings over both."""
        return {**_ENVIRONMENT, **os.environ, **self.environment}


@dataclass(frozen=True, slots=True)
class Rollback:
    """Go back to the weights of ``version``; ``discard`` drops the groups that were opened since."""

    version: int
    discard: bool = False


def broker_part(data: Path, port: int) -> Part:
    """The local broker over a folder; port 0 takes a free one and prints ``ready PORT``."""
    return Part(
        name="broker",
        role="broker",
        command=_module("headrace.connectors.broker", "--data", str(data), "--port", str(port), "--exit-with-parent"),
    )


def parts_of(config: RunConfig, config_file: Path, bootstrap: str, *, rollback: Rollback | None = None) -> list[Part]:
    """Operators, sources, trainers and rollout workers of a run, in the order in which they are started.

    ``rollback``: what trainers go back to first (protocol 8).
    """
    common = ("--config", str(config_file), "--bootstrap", bootstrap, "--exit-with-parent")
    parts = [
        Part(
            name="operators-0",
            role="operators",
            command=_module(
                "headrace.pipeline.runtime", *common, "--instance", "operators-0", "--stages", "schedule,assemble,batch"
            ),
        )
    ]
    parts += [_source(stream, common) for stream in config.streams]
    parts += [_trainer(config, name, common, None if p.frozen else rollback) for name, p in config.policies.items()]
    evaluators = config.eval.workers if config.eval.dataset else 0
    role = "train" if evaluators else "any"
    parts += [_worker(config, f"rollout-{number}", role, common) for number in range(config.rollout.workers)]
    parts += [_worker(config, f"eval-{number}", "eval", common) for number in range(evaluators)]
    rounds = {"compact": config.store.compact_seconds, "prune": config.store.prune_seconds}
    parts += [_upkeep(task, common) for task, seconds in rounds.items() if seconds > 0]
    return parts


def _source(stream: str, common: tuple[str, ...]) -> Part:
    name = f"source-{stream}"
    command = _module("headrace.pipeline.dataset_to_prompt", *common, "--instance", name, "--stream", stream)
    return Part(name=name, role="source", command=command)


def _worker(config: RunConfig, name: str, role: str, common: tuple[str, ...]) -> Part:
    command = _module("headrace.pipeline.task_to_trajectory", *common, "--instance", name, "--role", role)
    return Part(name=name, role="rollout", command=command, environment=_threads(config.rollout.threads))


def _upkeep(task: str, common: tuple[str, ...]) -> Part:
    command = _module("headrace.pipeline.delta_upkeep", *common, "--instance", task, "--task", task)
    return Part(name=task, role="upkeep", command=command)


def _trainer(config: RunConfig, policy: str, common: tuple[str, ...], rollback: Rollback | None) -> Part:
    trainer = config.trainer_of(policy)
    name = f"trainer-{policy}"
    words: tuple[str, ...] = ("headrace.trainers", *common, "--instance", name, "--policy", policy)
    if rollback is not None:
        words = (*words, "--resume-from", str(rollback.version), *(["--discard"] if rollback.discard else []))
    return _ranked(name, trainer, words)


def log_trainer_part(config: RunConfig, config_file: Path, policy: str, words: tuple[str, ...]) -> Part:
    """The trainer of a policy that reads recorded batches (``headrace train``). words: its further arguments."""
    common = ("--config", str(config_file), "--policy", policy, "--exit-with-parent")
    return _ranked(f"trainer-{policy}", config.trainer_of(policy), ("headrace.trainers.from_log", *common, *words))


def _ranked(name: str, trainer: TrainerConfig, words: tuple[str, ...]) -> Part:
    """A trainer's module with its arguments, alone or as several ranks under torchrun."""
    if trainer.ranks > 1:
        launcher = ("--standalone", "--nproc-per-node", str(trainer.ranks), "--max-restarts", "0", "-m")
        command = _module("torch.distributed.run", *launcher, *words)
    else:
        command = _module(*words)
    environment = _threads(trainer.threads)
    if not _has_gpu():
        environment["DS_ACCELERATOR"] = "cpu"
    return Part(name=name, role="trainer", command=command, environment=environment)


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count)}


def _has_gpu() -> bool:
    """Whether an NVIDIA device is visible; asks the system, not torch, which takes seconds to load."""
    return Path("/proc/driver/nvidia/version").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)
