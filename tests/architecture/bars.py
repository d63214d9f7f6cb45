"""Measure the shape of the source folders and compare it with the project's bars.

In: the Python files of `schemas`, `connectors`, `pipeline` and `trainers` (and of `tests`, for the ratio). Out: one
table, or JSON with `--json`; exit status 1 when a bar is missed. Files are parsed, never imported.

    python tests/architecture/bars.py [--json]
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("schemas", "connectors", "pipeline", "trainers")
BLOCK_LINES = 6  # this many equal significant lines in two places are a duplicated block
NOTES_SHOWN = 60

AT_MOST = {
    "module median": 120.0,
    "module p90": 400.0,
    "module max": 600.0,
    "function p95": 50.0,
    "function max": 100.0,
    "broad excepts per kLOC": 0.3,
    "global statements": 0.0,
    "import cycles": 0.0,
    "duplicated blocks": 0.0,
}
AT_LEAST = {
    "typed %": 100.0,
    "public docstrings %": 90.0,
    "module docstrings %": 100.0,
    "test lines per source line": 0.9,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Shape:
    """What one pass over the sources found: sizes in lines, counts, and the places worth naming."""

    modules: list[tuple[int, str]] = field(default_factory=list)
    functions: list[tuple[int, str]] = field(default_factory=list)
    typed: int = 0
    public: int = 0
    documented: int = 0
    described: int = 0
    broad: int = 0
    globals: int = 0
    notes: list[str] = field(default_factory=list)


def quantile(values: Sequence[int], share: float) -> int:
    """The value below which `share` of the sorted values lie (nearest rank, 0 for none)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0


def percent(part: int, whole: int) -> float:
    """`part` of `whole` in percent with one decimal; 100 for nothing at all."""
    return round(100 * part / whole, 1) if whole else 100.0


def sources(root: Path = ROOT) -> list[Path]:
    """Python files of the four source folders, in order."""
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]


def is_typed(function: Function) -> bool:
    """Every argument but self and cls is annotated, and so is the result."""
    spec = function.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    return function.returns is not None and all(
        argument.annotation is not None for argument in arguments if argument.arg not in ("self", "cls")
    )


def is_broad(handler: ast.ExceptHandler) -> bool:
    """A bare except, or one that names Exception or BaseException, alone or in a tuple."""
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in caught)


def inspect_function(shape: Shape, function: Function, place: str) -> None:
    """Add one function's length, types and docstring to the shape."""
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    shape.functions.append((length, place))
    if is_typed(function):
        shape.typed += 1
    else:
        shape.notes.append(f"not fully typed: {place}")
    if length > AT_MOST["function max"]:
        shape.notes.append(f"function of {length} lines: {place}")
    if not function.name.startswith("_"):
        shape.public += 1
        if ast.get_docstring(function):
            shape.documented += 1
        else:
            shape.notes.append(f"no docstring: {place}")


def inspect_module(shape: Shape, path: Path, name: str) -> None:
    """Add one module to the shape; files of fewer than three lines of text are no modules."""
    text = path.read_text(encoding="utf-8")
    if sum(1 for line in text.splitlines() if line.strip()) < 3:
        return
    tree = ast.parse(text, filename=name)
    lines = len(text.splitlines())
    shape.modules.append((lines, name))
    if lines > AT_MOST["module max"]:
        shape.notes.append(f"module of {lines} lines: {name}")
    if ast.get_docstring(tree):
        shape.described += 1
    else:
        shape.notes.append(f"no module docstring: {name}")
    for node in ast.walk(tree):
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, Function):
            inspect_function(shape, node, f"{place} {node.name}")
        elif isinstance(node, ast.ExceptHandler) and is_broad(node):
            shape.broad += 1
            shape.notes.append(f"broad except: {place}")
        elif isinstance(node, ast.Global):
            shape.globals += 1
            shape.notes.append(f"global: {place}")


def is_prose_or_interface(node: ast.stmt) -> bool:
    """Strings that stand alone, imports, `__all__` and fields without a value: nothing that could be shared."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def silent_lines(tree: ast.Module) -> set[int]:
    """Lines that carry no logic: prose, interfaces, and the signatures of functions with their decorators."""
    silent: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, Function):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            silent.update(range(first, node.body[0].lineno))
        elif isinstance(node, ast.stmt) and is_prose_or_interface(node):
            silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return silent


def significant_lines(text: str) -> Iterator[tuple[int, str]]:
    """(line number, folded text) of the lines that carry logic; comments, blanks and lone punctuation are left out."""
    silent = silent_lines(ast.parse(text))
    words: dict[int, list[str]] = defaultdict(list)
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.start[0] not in silent:
            words[token.start[0]].append(token.string)
    for number in sorted(words):
        line = " ".join(words[number])
        if any(character.isalnum() for character in line):
            yield number, line


def duplicated_blocks(files: Sequence[tuple[str, str]], size: int = BLOCK_LINES) -> list[str]:
    """Places where `size` or more significant lines stand twice, longest run first.

    `files` are (name, text). A run is named once by its first pair: "18 lines: a.py:10 ~ b.py:40".
    """
    texts = {name: list(significant_lines(text)) for name, text in files}
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    found: list[tuple[int, str]] = []
    covered: set[tuple[str, int]] = set()
    for name, lines in texts.items():
        for start in range(len(lines) - size + 1):
            window = tuple(text for _, text in lines[start : start + size])
            first = seen.setdefault(window, (name, start))
            overlaps = first[0] == name and start - first[1] < size
            if overlaps or (name, start) in covered:
                continue
            length = size
            other = texts[first[0]]
            while (
                start + length < len(lines)
                and first[1] + length < len(other)
                and lines[start + length][1] == other[first[1] + length][1]
            ):
                length += 1
            covered.update((name, start + step) for step in range(length - size + 1))
            found.append((length, f"{first[0]}:{other[first[1]][0]} ~ {name}:{lines[start][0]}"))
    return [f"{length} lines: {place}" for length, place in sorted(found, reverse=True)]


def imported_modules(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Modules of `known` that run when this module is imported (imports inside functions come later)."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, Function) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known:
                    yield full
                elif node.module in known:
                    yield node.module
        else:
            pending.extend(ast.iter_child_nodes(node))


def import_cycles(root: Path = ROOT) -> list[list[str]]:
    """Sets of modules that import each other, each sorted by name."""
    paths: dict[str, Path] = {}
    for path in sources(root):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(("headrace", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    known = set(paths)
    graph = {
        name: sorted(set(imported_modules(ast.parse(path.read_text(encoding="utf-8")), known)) - {name})
        for name, path in paths.items()
    }
    return [sorted(group) for group in strongly_connected(graph) if len(group) > 1]


def strongly_connected(graph: dict[str, list[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (two passes of depth-first search, after Kosaraju)."""
    order: list[str] = []
    visited: set[str] = set()
    for root in graph:
        pending = [(root, False)]
        while pending:
            node, left = pending.pop()
            if left:
                order.append(node)
            elif node not in visited:
                visited.add(node)
                pending.append((node, True))
                pending.extend((target, False) for target in graph[node])
    backward: dict[str, list[str]] = {node: [] for node in graph}
    for node, targets in graph.items():
        for target in targets:
            backward[target].append(node)
    groups: list[list[str]] = []
    placed: set[str] = set()
    for root in reversed(order):
        group: list[str] = []
        stack = [root]
        while stack:
            node = stack.pop()
            if node not in placed:
                placed.add(node)
                group.append(node)
                stack.extend(backward[node])
        if group:
            groups.append(group)
    return groups


def measure(root: Path = ROOT) -> tuple[dict[str, float], list[str]]:
    """All figures by name, and notes that name the places behind them."""
    shape = Shape()
    files: list[tuple[str, str]] = []
    for path in sources(root):
        name = str(path.relative_to(root))
        files.append((name, path.read_text(encoding="utf-8")))
        inspect_module(shape, path, name)
    sizes = [lines for lines, _ in shape.modules]
    lengths = [length for length, _ in shape.functions]
    total = sum(sizes)
    cycles = import_cycles(root)
    blocks = duplicated_blocks(files)
    tests = sum(path.read_text(encoding="utf-8").count("\n") for path in (root / "tests").rglob("*.py"))
    figures = {
        "modules": float(len(sizes)),
        "lines": float(total),
        "module median": float(median(sizes)) if sizes else 0.0,
        "module p90": float(quantile(sizes, 0.9)),
        "module max": float(max(sizes, default=0)),
        "function median": float(median(lengths)) if lengths else 0.0,
        "function p95": float(quantile(lengths, 0.95)),
        "function max": float(max(lengths, default=0)),
        "typed %": percent(shape.typed, len(lengths)),
        "public docstrings %": percent(shape.documented, shape.public),
        "module docstrings %": percent(shape.described, len(sizes)),
        "broad excepts per kLOC": round(1000 * shape.broad / max(1, total), 2),
        "global statements": float(shape.globals),
        "import cycles": float(len(cycles)),
        "duplicated blocks": float(len(blocks)),
        "test lines per source line": round(tests / max(1, total), 2),
    }
    notes = [f"import cycle: {' <-> '.join(cycle)}" for cycle in cycles]
    notes += [f"duplicated {block}" for block in blocks]
    return figures, notes + shape.notes


def missed_bars(figures: dict[str, float]) -> list[str]:
    """Names of the figures on the wrong side of their bar."""
    over = [name for name, bar in AT_MOST.items() if figures[name] > bar]
    return over + [name for name, bar in AT_LEAST.items() if figures[name] < bar]


def table(figures: dict[str, float], notes: Sequence[str]) -> str:
    """The figures beside their bars, one a line, then the first notes; missing docstrings only when their bar is."""
    missed = missed_bars(figures)
    if "public docstrings %" not in missed:
        notes = [note for note in notes if not note.startswith("no docstring")]
    rows = []
    for name, value in figures.items():
        bar = f"<= {AT_MOST[name]:g}" if name in AT_MOST else f">= {AT_LEAST[name]:g}" if name in AT_LEAST else ""
        rows.append(f"{name:28}{value:>10g}   {bar:10}{'MISSED' if name in missed else ''}".rstrip())
    return "\n".join([*rows, *(f"  {note}" for note in notes[:NOTES_SHOWN])])


def main(arguments: Sequence[str]) -> int:
    """Print the table (or JSON) and return the exit status."""
    figures, notes = measure()
    missed = missed_bars(figures)
    if "--json" in arguments:
        print(json.dumps({"figures": figures, "missed": missed, "notes": notes}, indent=1))
    else:
        print(table(figures, notes))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
