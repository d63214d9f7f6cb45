"""The command ``headrace``: one table of subcommands, each loaded only when it is called.

``headrace --help`` therefore imports neither a Kafka client nor pydantic nor torch. Exit codes: 0 done, 1 a failure or
a breach that was found, 2 wrong arguments, 75 superseded, 78 a person has to change the configuration, 130 interrupted.
"""

import importlib
import sys
from collections.abc import Sequence

import typer

from headrace.pipeline.cli.arguments import tidy
from headrace.schemas.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILURE,
    EXIT_SUPERSEDED,
    ConfigurationError,
    HeadraceError,
    Superseded,
)

__all__ = ("COMMANDS", "main")

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("headrace.pipeline.cli.run", "Start a run, or go on with one: headrace run @ run.toml [key=value ...]"),
    "train": ("headrace.pipeline.cli.train", "Train again from a run's recorded batches, without rollouts"),
    "report": ("headrace.pipeline.cli.report", "Figures and curves of a run"),
    "verify": ("headrace.pipeline.cli.verify", "Prove from its topics that a run lost and repeated nothing"),
    "balance": ("headrace.pipeline.cli.balance", "Whether rollouts or training wait, and how many workers should be"),
    "simulate": ("headrace.pipeline.cli.simulate", "Runs in virtual time: the papers' figures, the size of a cluster"),
    "topics": ("headrace.pipeline.cli.topics", "Look into the topics of a run"),
    "groups": ("headrace.pipeline.cli.groups", "Positions of the consumer groups of a run"),
    "workers": ("headrace.pipeline.cli.workers", "Rollout workers of a run: list, suspend, resume"),
    "trace": ("headrace.pipeline.cli.trace", "Follow one prompt from its record to the step that trained it"),
    "replay": ("headrace.pipeline.cli.replay", "Decide again on recorded records with other operators, and compare"),
    "dead-letters": ("headrace.pipeline.cli.dead_letters", "Records that a stage could not use"),
    "deltas": ("headrace.pipeline.cli.deltas", "Weights in the object store: list, show, verify, merge, prune"),
    "flow": ("headrace.pipeline.cli.flow", "The path of the data: stages, topics, records"),
    "operators": ("headrace.pipeline.cli.operators", "Installed plug-ins by group; write and try an operator"),
    "workflows": ("headrace.pipeline.cli.workflows", "How episodes are played: list, show, check, write and try"),
    "environments": ("headrace.pipeline.cli.environments", "What agents act in: list, show, check, write and try"),
    "rewards": ("headrace.pipeline.cli.rewards", "What completions are worth: list, show, check, write and try"),
    "losses": ("headrace.pipeline.cli.losses", "What training minimises: list, show, check, write and try"),
    "advantages": ("headrace.pipeline.cli.advantages", "What rewards become in training: list, show, check, write"),
    "engines": ("headrace.pipeline.cli.engines", "What samples completions: list, show, check, write and try"),
    "datasets": ("headrace.pipeline.cli.datasets", "What prompts are read from: list, show, check, write and try"),
    "broker": ("headrace.pipeline.cli.broker", "The local broker by itself"),
    "kafka": ("headrace.pipeline.cli.kafka", "Apache Kafka on this machine without containers; rights and logins"),
    "schema": ("headrace.pipeline.cli.schema", "Schemas of the records in a schema registry"),
    "janitor": ("headrace.pipeline.cli.janitor", "Delete what finished and orphaned runs left behind"),
    "doctor": ("headrace.pipeline.cli.doctor", "Check this machine, the broker and the object store"),
    "version": ("headrace.pipeline.cli.version", "Print the version"),
}
"""Subcommands: the module that holds ``app``, and one line of help."""

_EPILOG = "Every command that reads takes --format text|json. headrace COMMAND --help says more."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; the entry point of the console script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    if name not in COMMANDS:
        _root()(args=words or ["--help"], prog_name="headrace")
        return
    app = importlib.import_module(COMMANDS[name][0]).app
    try:
        app(args=words[1:], prog_name=f"headrace {name}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except HeadraceError as error:
        sys.stderr.write(f"headrace {name}: {tidy(str(error))}\n")
        sys.exit(_exit_code(error))
    except OSError as error:
        if error.filename is None:
            raise
        sys.stderr.write(f"headrace {name}: {error}\n")
        sys.exit(EXIT_FAILURE)


def _exit_code(error: HeadraceError) -> int:
    if isinstance(error, ConfigurationError):
        return EXIT_CONFIGURATION
    return EXIT_SUPERSEDED if isinstance(error, Superseded) else EXIT_FAILURE


def _root() -> typer.Typer:
    """The command that only knows the names of the others; it answers --help and refuses unknown names."""
    root = typer.Typer(
        no_args_is_help=True, add_completion=False, epilog=_EPILOG, rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="RL post-training of language models as a stream of records: topics, operators, trainers, weight deltas.",
    )  # fmt: skip
    for name, (_, text) in COMMANDS.items():
        root.command(name, help=text, short_help=text)(_unused)
    return root


def _unused() -> None:
    """Stands in for a subcommand in the list of commands."""
