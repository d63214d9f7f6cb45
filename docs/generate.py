"""Write the parts of the documentation that are facts of the code: topics, records, settings, commands, plug-ins.

In: the packages and `pyproject.toml`. Out: the text between `<!-- generated: NAME -->` and `<!-- end -->` in the
documents, so that it cannot drift from the code. `--check` writes nothing and fails when something would change.

    python docs/generate.py [--check]
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.S)


def row(*cells: object) -> str:
    """One line of a table; bars inside a cell are escaped and line breaks folded."""
    return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"


def table(head: Sequence[str], rows: Sequence[str]) -> str:
    """A Markdown table."""
    return "\n".join([row(*head), "|" + "---|" * len(head), *rows]) + "\n"


def first_paragraph(text: str | None) -> str:
    """The words up to the first empty line or example, on one line."""
    paragraph = re.split(r"\n\s*\n|\n\s*Example", inspect.cleandoc(text or ""))[0]
    return " ".join(paragraph.replace("``", "`").split())


def code(names: Sequence[str]) -> str:
    """Names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def topics() -> str:
    """The map of topics."""
    from headrace.schemas.topics import TOPICS

    counts = {"one": "1", "groups": "N", "inboxes": "I", "policies": "policies", "lanes": "L"}
    rows = []
    for spec in TOPICS:
        name = f"`{spec.name}{'.<policy>' if spec.per_policy else ''}`" + (" (compacted)" if spec.compacted else "")
        records = code(spec.records) or "original bytes"
        rows.append(row(name, counts[spec.partitions], spec.by, records, code(spec.writers), code(spec.readers)))
    return table(["topic", "partitions", "by", "records", "written by", "read by"], rows)


def records() -> str:
    """Every record with its fields."""
    from headrace.schemas.records import RECORD_TYPES

    rows = []
    for name, cls in RECORD_TYPES.items():
        fields = code([field.name for field in dataclasses.fields(cls)])
        rows.append(row(f"`{name}`", first_paragraph(cls.__doc__), fields))
    return table(["record", "what it says", "fields"], rows)


def field_notes(model: type[BaseModel]) -> dict[str, str]:
    """Field name -> the string that stands below it in the source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for field, note in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(note, ast.Expr)
            and isinstance(note.value, ast.Constant)
            and isinstance(note.value.value, str)
        ):
            notes[field.target.id] = first_paragraph(note.value.value)
    return notes


def type_name(annotation: Any) -> str:
    """A type as a reader of TOML would say it."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = text.replace("typing.", "").replace("<class '", "").replace("'>", "")
    literal = re.fullmatch(r"Literal\[(.*)\]", text)
    return literal[1].replace("'", '"').replace(", ", " or ") if literal else text


def section(title: str, model: type[BaseModel]) -> str:
    """One section of the configuration: a line about it, then its keys."""
    notes = field_notes(model)
    rows = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "a section of its own"
        if not isinstance(default, BaseModel):
            shown = "required" if default is PydanticUndefined else f"`{json.dumps(default)}`"
        rows.append(row(f"`{name}`", type_name(field.annotation), shown, notes.get(name, "")))
    about = re.sub(r"^`\[[^`]*`: ", "", first_paragraph(model.__doc__))
    about = about[:1].upper() + about[1:]
    return f"### `{title}`\n\n{about}\n\n" + table(["key", "type", "default", "meaning"], rows)


def configuration() -> str:
    """Every section of a run's configuration."""
    config = importlib.import_module("headrace.schemas.config")
    sections = [
        ("[run]", "RunSection"), ("[kafka]", "KafkaConfig"), ("[runtime]", "RuntimeConfig"),
        ("[registry]", "RegistryConfig"),
        ("[store]", "StoreConfig"), ("[rollout]", "RolloutConfig"), ("[trainer]", "TrainerConfig"),
        ("[trainer.lora]", "LoraConfig"), ("[trainer.critic]", "CriticConfig"), ("[metrics]", "MetricsConfig"),
        ("[eval]", "EvalConfig"), ("[policies.P]", "PolicyConfig"), ("[streams.S]", "StreamConfig"),
        ("[[operators]]", "OperatorConfig"),
    ]  # fmt: skip
    return "\n".join(section(title, getattr(config, name)) for title, name in sections)


def engines() -> str:
    """The options of every engine."""
    models = [
        ("vllm", "vllm_settings", "VllmOptions"), ("transformers", "transformers", "TransformersOptions"),
        ("openai", "openai_stream", "OpenAIOptions"), ("scripted", "scripted", "ScriptedOptions"),
    ]  # fmt: skip
    return "\n".join(
        section(
            f"[rollout.options] of {engine}",
            getattr(importlib.import_module(f"headrace.connectors.engines.{file}"), name),
        )
        for engine, file, name in models
    )


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that call it."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield words, command
    else:
        for name in sorted(subcommands):
            if not subcommands[name].hidden:
                yield from leaves(subcommands[name], (*words, name))


def usage(words: tuple[str, ...], command: Any) -> str:
    """`headrace WORDS ARGUMENTS`."""
    arguments = [(p.metavar or p.name).upper() for p in command.params if p.param_type_name == "argument"]
    return f"`{' '.join(('headrace', *words, *arguments))}`"


def commands() -> str:
    """Every command of the command line with its options."""
    import typer

    names = importlib.import_module("headrace.pipeline.cli.main").COMMANDS
    rows = []
    for name, (module, about) in names.items():
        top = typer.main.get_command(importlib.import_module(module).app)
        for words, command in leaves(top, (name,)):
            options = [
                option
                for parameter in command.params
                if parameter.param_type_name == "option" and parameter.name != "help" and not parameter.hidden
                for option in parameter.opts[:1]
            ]
            help_text = first_paragraph(command.help) if len(words) > 1 else ""
            rows.append(row(usage(words, command), help_text or f"{about.split(': headrace')[0]}.", code(options)))
    return table(["command", "what it does", "options"], rows)


def plugins() -> str:
    """Every plug-in that the package brings, by group."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    rows = []
    for group, points in groups.items():
        for name, target in sorted(points.items()):
            module, _, attribute = target.partition(":")
            loaded = importlib.import_module(module)
            about = first_paragraph(getattr(loaded, attribute).__doc__).removeprefix("See the module.").strip()
            about = about if len(about) > len(name) + 14 else first_paragraph(loaded.__doc__)
            rows.append(row(f"`{group.removeprefix('headrace.')}`", f"`{name}`", about))
    return table(["kind", "name", "what it does"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "topics": topics,
    "records": records,
    "configuration": configuration,
    "engines": engines,
    "commands": commands,
    "plugins": plugins,
}


def refreshed(text: str) -> str:
    """A document with every generated block written anew. Raises KeyError for a block that nothing generates."""
    return MARK.sub(lambda match: match[1] + "\n" + BLOCKS[match[2]]() + "\n" + match[3], text)


def main(arguments: Sequence[str]) -> int:
    """Refresh README.md and docs/*.md, or with --check name those that would change (exit status 1)."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    check = "--check" in arguments
    for name in stale:
        print(f"{name}: differs from the code; run python docs/generate.py" if check else f"{name}: written")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
