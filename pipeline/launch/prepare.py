"""From a person's words to a run that can start: id, folder, placeholders, warm start, topics, the manifest record.

``{folder}`` in models, options of workflows and the warm start's command stands for the run folder, ``{here}`` in
datasets and these options for the folder of the configuration file, ``{python}`` in commands for this interpreter, so
that a recipe runs from anywhere. Every step may be repeated: a resumed run comes by too.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.connectors.cluster_runs import has_record_since
from headrace.connectors.kafka import Connection
from headrace.connectors.model_folder import tokenizer_digest
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.prompt_chain import resolved
from headrace.schemas.codec import encode, headers_of
from headrace.schemas.config import RunConfig, dump_config, load_config
from headrace.schemas.errors import EXIT_CONFIGURATION, ConfigurationError, HeadraceError
from headrace.schemas.records import RunManifest
from headrace.schemas.topics import partition_counts

__all__ = ("check_trainers", "create_topics", "resolve", "warm_start")


def resolve(
    files: Sequence[str], overrides: Sequence[str], *, resume: bool, now: Callable[[], float] = time.time
) -> RunConfig:
    """The configuration of the run to start, or with ``resume`` to go on with.

    ``files`` is one run folder, or TOML files. Without ``run.id`` a new run takes its recipe's name and the time.
    Raises ConfigurationError when the run exists (or, resuming, does not).
    """
    if len(files) == 1 and Path(files[0]).is_dir():
        return _of_folder(Path(files[0]), overrides, resume)
    config = load_config(files, overrides)
    if "id" not in config.run.model_fields_set:
        run_id = _newest_id(Path(files[0]), Path(config.run.folder)) if resume else _fresh_id(Path(files[0]), now())
        config = _with(config, "run", id=run_id)
    config = _with(config, "run", folder=str(Path(config.run.folder).absolute()))
    folder = RunFolder.of(config)
    if folder.config.exists() and not resume:
        raise ConfigurationError(
            f"run {config.run.id} exists in {folder.path}: go on with it by --resume, or choose another run.id"
        )
    if resume and not folder.config.exists():
        raise ConfigurationError(f"no run {config.run.id} in {folder.path} to go on with")
    return resolved(_filled(config, folder.path, Path(files[0]).absolute().parent))


def _of_folder(path: Path, overrides: Sequence[str], resume: bool) -> RunConfig:
    folder = RunFolder.existing(path)
    if not resume:
        raise ConfigurationError(f"{path} is a run that exists: add --resume to go on with it")
    if folder.training.exists():
        raise ConfigurationError(f"{path} is a training from the log: go on with it by headrace train --resume {path}")
    config = folder.read_config()
    over = load_config([folder.config], overrides) if overrides else config
    return _with(over, "run", folder=config.run.folder)


def _recipe_name(file: Path) -> str:
    """The recipe's name as a part of a run id: its folder's for ``run.toml``, else its own."""
    name = file.stem if file.stem != "run" else file.absolute().parent.name
    return (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run")[:24]


def _newest_id(file: Path, parent: Path) -> str:
    """The id of the newest run of a recipe. Raises ConfigurationError when there is none."""
    found = sorted(parent.glob(f"{_recipe_name(file)}-*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigurationError(f"no run of {file} in {parent} to go on with: name one by run.id=ID or by its folder")
    return found[-1].parent.name


def _fresh_id(file: Path, now: float) -> str:
    """The recipe's name and the time, such as ``sort-digits-20261130-061500``."""
    return f"{_recipe_name(file)}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


def _with(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """The configuration with keys of one section replaced."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _filled(config: RunConfig, folder: Path, here: Path) -> RunConfig:
    """Placeholders replaced."""

    def fill(text: str) -> str:
        return text.replace("{folder}", str(folder)).replace("{here}", str(here))

    policies = {n: p.model_copy(update={"model": fill(p.model)}) for n, p in config.policies.items()}

    def within(value: Any) -> Any:
        if isinstance(value, str):
            return fill(value).replace("{python}", sys.executable)
        if isinstance(value, list):
            return [within(one) for one in value]
        return {key: within(one) for key, one in value.items()} if isinstance(value, dict) else value

    streams = {
        n: s.model_copy(update={"dataset": fill(s.dataset), "workflow_options": within(s.workflow_options)})
        for n, s in config.streams.items()
    }
    warm = {k: v.replace("{here}", str(here)) if isinstance(v, str) else v for k, v in config.warm_start.items()}
    config = _with(config, "eval", dataset=fill(config.eval.dataset))
    return config.model_copy(update={"policies": policies, "streams": streams, "warm_start": warm})


def check_trainers(config: RunConfig) -> None:
    """Ask the trainers' own code, in a process of its own, whether it would refuse the configuration.

    Raises ConfigurationError with its reason; nothing is written into the run folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        dump_config(config, file)
        words = [sys.executable, "-m", "headrace.trainers.check", "--config", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        said = done.stderr.strip().replace(str(file), "the configuration")
    if done.returncode == EXIT_CONFIGURATION:
        raise ConfigurationError(said.rpartition("configuration error: ")[2])
    if done.returncode:
        raise HeadraceError(f"the trainers cannot be checked, {shlex.join(words[1:3])} ended so:\n{said[-2000:]}")


def warm_start(config: RunConfig, python: str, say: Callable[[str], None], stopped: Callable[[], bool]) -> None:
    """Run ``warm_start.command`` once, when a policy's model folder does not exist yet.

    ``{python}``, ``{folder}`` and ``{seed}`` are filled in. Returns early when ``stopped``. Raises ConfigurationError
    with the end of what the command printed when it fails, or when a model folder is missing after it.
    """
    folder = RunFolder.of(config)
    missing = [p.model for p in config.policies.values() if not Path(p.model).is_dir()]
    command = config.warm_start.get("command", "")
    if not isinstance(command, str):
        raise ConfigurationError(f"warm_start.command is {command!r}; it must be a command line as text")
    if missing and command:
        say("warm start: making the model that the run starts from")
        words = _words_of(command, python=python, folder=folder.path, seed=config.run.seed)
        log = folder.logs / "warm-start.log"
        code = _run_command(words, log, stopped)
        if stopped():
            return
        text = log.read_text("utf-8", "replace").strip()
        if code != 0:
            raise ConfigurationError(f"warm_start.command ended with {code}: {shlex.join(words)}\n{text[-2000:]}")
        say(text.splitlines()[-1] if text else "warm start: done")
        missing = [model for model in missing if not Path(model).is_dir()]
    if missing:
        raise ConfigurationError(f"no model folder {', '.join(missing)}: check policies.P.model or warm_start.command")


def _words_of(command: str, **values: object) -> list[str]:
    """The words of a command line with its placeholders filled in. Raises ConfigurationError."""
    try:
        return [word.format(**values) for word in shlex.split(command)]
    except (KeyError, IndexError, ValueError) as error:
        names = ", ".join(f"{{{name}}}" for name in ("here", *values))
        raise ConfigurationError(f"warm_start.command: {error!r} in {command!r}; placeholders are {names}") from error


_WITH_PARENT = """
import os, signal, sys, threading
def watch():
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
import subprocess
sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL))
"""
"""Runs a command that knows nothing of launchers, and ends it with all its children when the pipe at 0 closes."""


def _run_command(words: list[str], log: Path, stopped: Callable[[], bool]) -> int:
    """Run a command to its end, or kill it with its children when ``stopped``; returns its exit code.

    Raises ConfigurationError when there is no such command.
    """
    if shutil.which(words[0]) is None:
        raise ConfigurationError(f"warm_start.command: there is no program {words[0]}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, *words],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    with process:
        while process.poll() is None:
            if stopped():
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.05)
    return process.returncode


def create_topics(
    config: RunConfig, connection: Connection, *, resume: bool, now: Callable[[], float] = time.time
) -> None:
    """Create the run's topics and write its RunManifest, unless it is there.

    Topics without a manifest are taken: an administrator has made them ahead, or a launcher died in between. Raises
    ConfigurationError when a run of this id exists on the cluster and is not to be resumed, or when one was there whose
    deletion did not end.
    """
    existing = connection.list_run_topics()
    found = _manifest_of(connection) if "run" in existing else None
    if existing and found is None and has_record_since(connection, existing, 0):
        raise ConfigurationError(
            f"topics of run {config.run.id} at {connection.bootstrap} hold records, but the run has no manifest: its "
            f"deletion did not end. End it: headrace topics delete --run {config.run.id}, or choose another run.id"
        )
    if found is not None and not resume:
        raise ConfigurationError(
            f"run {config.run.id} exists on the cluster at {connection.bootstrap}: go on with it by --resume, choose "
            f"another run.id, or remove it: headrace topics delete --run {config.run.id}"
        )
    policies = config.policy_names()
    counts = partition_counts(
        policies, groups=config.run.group_partitions, inboxes=config.run.inboxes, lanes=config.run.lanes
    )
    connection.ensure_topics(counts)
    digest = _one_digest(config)
    if found is not None:
        if found.tokenizer_digest != digest:
            raise ConfigurationError(
                f"run {config.run.id} was created with another tokenizer (digest {found.tokenizer_digest[:12]}, "
                f"the model folder has {digest[:12]}): give back the model folder it was created with"
            )
        return
    manifest = RunManifest(
        run=config.run.id,
        created_ms=int(now() * 1000),
        tokenizer_digest=digest,
        policies=policies,
        streams=list(config.streams),
        partitions=counts,
        config=config.model_dump_json(),
        schema_ids=dict(connection.schema_ids),
    )
    producer = connection.producer("launcher")
    headers = headers_of(manifest, config.run.id, _version())
    connection.produce(producer, "run", encode(manifest), partition=0, key=b"manifest", headers=headers)
    if producer.flush(30.0):
        raise ConfigurationError(f"the run's manifest could not be written to {connection.bootstrap} within 30 s")


def _manifest_of(connection: Connection) -> RunManifest | None:
    """The first manifest of the run, None before it is created."""
    records = (raw.decoded_if_ours() for raw in connection.read_topic("run"))
    return next((record for record in records if isinstance(record, RunManifest)), None)


def _one_digest(config: RunConfig) -> str:
    """The tokenizer's digest, which all policies of a run share."""
    digests = {name: tokenizer_digest(policy.model) for name, policy in config.policies.items()}
    if len(set(digests.values())) > 1:
        told = ", ".join(f"{name} {digest[:12]}" for name, digest in digests.items())
        raise ConfigurationError(f"the policies' tokenizers differ ({told}): token ids of one could not train another")
    return next(iter(digests.values()))


def _version() -> str:
    from importlib.metadata import version

    return version("headrace")
