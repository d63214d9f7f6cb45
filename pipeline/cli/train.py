"""``headrace train``: train a policy again from recorded batches, with other settings or to find a divergence."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import Bootstrap, command_group
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.pipeline.launch.folder import RunFolder
    from headrace.pipeline.launch.parts import Part
    from headrace.schemas.config import RunConfig

__all__ = ("app",)

app = command_group("Train from recorded batches.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training from the log trains: the recorded run's folder, the policy, first and last batch (0: all)."""

    recorded: str
    policy: str
    first: int = 1
    last: int = 0


@app.command()
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE ...]", help="Settings that differ from the recorded run's."),
    ] = None,
    recorded: Annotated[str, typer.Option("--from-batches", metavar="RUN", help="Folder of the recorded run.")] = "",
    span: Annotated[
        str, typer.Option("--range", metavar="A:B", help="First and last batch; either may be left out.")
    ] = "",
    policy: Annotated[str, typer.Option(help="The policy to train, where the run has several.")] = "",
    resume: Annotated[str, typer.Option("--resume", metavar="FOLDER", help="Go on with a training from the log.")] = "",
    back_to: Annotated[
        int, typer.Option("--from", metavar="K", min=-1, help="With --resume: from a checkpoint at or before batch K.")
    ] = -1,
    bootstrap: Bootstrap = "",
) -> None:
    """Train again from recorded batches: headrace train --from-batches runs/ID --range 1:40 trainer.loss=cispo

    Nothing is generated and the recorded run is only read. The training has a folder of its own with metrics.jsonl (a
    line for every batch, with a digest of the weights and whether they are the recorded ones), checkpoints and the
    model. It begins with the run's newest checkpoint before A, or with its initial weights.
    """
    from headrace.pipeline.launch.prepare import check_trainers

    if bool(recorded) == bool(resume):
        raise ConfigurationError("name a recorded run by --from-batches RUN, or a training to go on with by --resume")
    if back_to >= 0 and not resume:
        raise ConfigurationError("--from K goes back within a training that exists: add --resume FOLDER")
    if resume:
        if words or span or policy:
            raise ConfigurationError("--resume goes on with the settings in the folder: give no others")
        folder, config, training = _existing(resume)
    else:
        folder, config, training = _new(recorded, words or [], span, policy, check_trainers)
    _train(folder, config, training, bootstrap, back_to)
    sys.stdout.write(f"run: {folder.path}\n")


def _new(
    recorded: str, overrides: list[str], span: str, policy: str, check: "Callable[[RunConfig], None]"
) -> "tuple[RunFolder, RunConfig, Training]":
    """A folder beside the recorded run's, or where ``run.folder`` and ``run.id`` say. check: called before it is made;
    raises ConfigurationError for settings that a trainer would refuse.
    """
    from headrace.pipeline.launch.folder import RunFolder
    from headrace.schemas.config import dump_config, load_config

    source = RunFolder.existing(recorded)
    base = source.read_config()
    named = any(word.startswith("run.id=") for word in overrides)
    own = [] if named else [f"run.id={base.run.id[:20].rstrip('-')}-again-{time.strftime('%m%d-%H%M%S')}"]
    place = json.dumps(str(source.path.absolute().parent))
    config = load_config([source.config], [f"run.folder={place}", *own, *overrides])
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"folder": str(Path(config.run.folder).absolute())})}
    )
    names = base.policy_names()
    if (policy and policy not in names) or (not policy and len(names) != 1):
        raise ConfigurationError(f"run {base.run.id} has the policies {', '.join(names)}: name one by --policy")
    if config.policy_names() != names:
        raise ConfigurationError("policies cannot be added to a recorded run: its batches are of those that it had")
    first, last = _span(span)
    folder = RunFolder.of(config)
    if folder.config.exists():
        raise ConfigurationError(f"{folder.path} exists: choose another run.id, or go on with it by --resume")
    if config.run.id == base.run.id:  # in an object store, checkpoints lie under the id
        raise ConfigurationError(f"run.id={base.run.id} is the recorded run's: its checkpoints must stay, take another")
    check(config)
    training = Training(recorded=str(source.path.absolute()), policy=policy or names[0], first=first, last=last)
    for name in ("logs", "checkpoints", "model"):
        (folder.path / name).mkdir(parents=True, exist_ok=True)
    folder.training.write_text(json.dumps({**asdict(training), "overrides": overrides}, indent=2) + "\n", "utf-8")
    dump_config(config, folder.config)
    return folder, config, training


def _existing(path: str) -> "tuple[RunFolder, RunConfig, Training]":
    from headrace.pipeline.launch.folder import RunFolder

    folder = RunFolder.existing(path)
    try:
        told = json.loads(folder.training.read_text("utf-8"))
        training = Training(**{name: told[name] for name in ("recorded", "policy", "first", "last")})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} is no training from the log: {folder.training}: {error}") from error
    return folder, folder.read_config(), training


def _span(text: str) -> tuple[int, int]:
    """``A:B``, ``A:``, ``:B`` or ``A``, counted from 1, both included; (1, 0) for all.

    >>> _span("3:"), _span(":7"), _span("5"), _span("")
    ((3, 0), (1, 7), (5, 5), (1, 0))
    """
    first, colon, last = text.partition(":")
    try:
        begin = int(first) if first.strip() else 1
        end = int(last) if last.strip() else 0 if colon or not text else begin
    except ValueError:
        begin = 0
    if begin < 1 or (end and end < begin):
        raise ConfigurationError(f"--range {text!r} is not of the form A:B with 1 <= A <= B, such as 1:40")
    return begin, end


def _train(folder: "RunFolder", config: "RunConfig", training: Training, bootstrap: str, back_to: int) -> None:
    """Run the trainer to its end, started again when it dies; its words go to the terminal and to its log."""
    import os

    from headrace.pipeline.launch.folder import RunFolder
    from headrace.pipeline.launch.local_broker import broker_of
    from headrace.pipeline.launch.parts import log_trainer_part
    from headrace.pipeline.launch.supervisor import Supervisor

    source = RunFolder.existing(training.recorded)
    lock = folder.lock()
    run = config.run
    supervisor = Supervisor(folder.logs, max_restarts=run.max_restarts, window_seconds=run.restart_window_seconds)
    try:
        with broker_of(source, bootstrap) as address:
            given = {
                "recorded": training.recorded,
                "bootstrap": address,
                "first": training.first,
                "last": training.last,
            }
            words = tuple(word for name, value in given.items() for word in (f"--{name}", str(value)))

            def part(*more: str) -> "Part":
                return log_trainer_part(config, folder.config, training.policy, (*words, *more))

            log = supervisor.log_of(part().name)
            shown = log.stat().st_size if log.exists() else 0
            supervisor.start(part(*(["--back-to", str(back_to)] if back_to >= 0 else [])))
            supervisor.replace(part())
            while supervisor.running():
                for message in supervisor.check():
                    sys.stderr.write(f"{message}\n")
                shown = _show(log, shown)
                time.sleep(0.1)
            _show(log, shown)
    finally:
        supervisor.stop(supervisor.all_names(), grace_seconds=10)
        os.close(lock)


def _show(log: Path, after: int) -> int:
    """Print what has come to a log since; the new position."""
    if not log.exists():
        return after
    with log.open("rb") as file:
        file.seek(after)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    sys.stdout.write(whole.decode("utf-8", "replace"))
    sys.stdout.flush()
    return after + len(whole)
