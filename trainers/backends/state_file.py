"""The state of a training backend on disk: masters and optimizer moments as runs of elements of named parameters.

Every rank writes the runs that it holds, so nothing is gathered for a checkpoint; every rank reads the runs that it
needs, so any count of ranks, ZeRO stage or backend goes on from it. Tensors are in safetensors files and read by range.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.schemas.errors import ConfigurationError

__all__ = ("MASTER", "SavedState", "StatePart", "owners")

MASTER = "master"
"""The kind of the fp32 weights; other kinds are the optimizer's, such as ``exp_avg``."""
_FORMAT = "headrace-state/1"
_RANDOM = "random"


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which rank writes each of several replicated tensors, so that all write about as much.

    >>> owners([4, 4, 2, 6], 2)
    [0, 1, 0, 1]
    """
    loads = [0] * ranks
    out = []
    for size in sizes:
        rank = loads.index(min(loads))
        loads[rank] += size
        out.append(rank)
    return out


@dataclass(slots=True)
class StatePart:
    """One rank's part, copied to host memory: it stays as it is while training goes on.

    step: the optimizer's count of updates. runs: (kind, parameter) to runs (first element, values: flat fp32).
    """

    rank: int
    ranks: int
    step: float = 0.0
    runs: dict[tuple[str, str], list[tuple[int, Tensor]]] = field(default_factory=dict)
    random: Tensor = field(default_factory=torch.get_rng_state)

    def add(self, kind: str, name: str, start: int, values: Tensor) -> None:
        """Copy a run of elements of a parameter, flat."""
        copy = values.detach().to("cpu", torch.float32, copy=True).contiguous().reshape(-1)
        self.runs.setdefault((kind, name), []).append((start, copy))

    def write(self, folder: Path) -> None:
        """Write ``state-RANK.safetensors`` into an existing folder. Raises OSError."""
        from safetensors.torch import save_file

        tensors = {_RANDOM: self.random}
        for (kind, name), runs in self.runs.items():
            tensors.update({f"{kind}/{name}@{start}": values for start, values in runs})
        common = {"format": _FORMAT, "step": self.step, "ranks": self.ranks}
        save_file(tensors, _file(folder, self.rank), metadata={"headrace": json.dumps(common)})


class SavedState:
    """A state in a folder. Raises ConfigurationError when there is none, or not all of it."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._files: list[Any] = []
        self._runs: dict[tuple[str, str], list[tuple[int, int, Any, str]]] = {}
        first = _file(folder, 0)
        if not first.is_file():
            raise ConfigurationError(f"{folder} holds no state of a backend of headrace: {first.name} is not there")
        with safe_open(first, "pt") as file:
            common = json.loads((file.metadata() or {}).get("headrace", "{}"))
        if common.get("format") != _FORMAT:
            raise ConfigurationError(f"{first} has format {common.get('format')}, {_FORMAT} was expected")
        self.step, self.ranks = float(common["step"]), int(common["ranks"])
        for rank in range(self.ranks):
            path = _file(folder, rank)
            if not path.is_file():
                raise ConfigurationError(f"{path} is not there: the state of {self.ranks} ranks is not whole")
            opened: Any = safe_open(path, "pt")
            self._take(opened.__enter__())

    def _take(self, file: Any) -> None:
        self._files.append(file)
        for key in list(file.keys()):
            kind, found, place = key.partition("/")
            name, _, start = place.rpartition("@")
            if found:
                (count,) = file.get_slice(key).get_shape()
                self._runs.setdefault((kind, name), []).append((int(start), int(start) + count, file, key))

    @property
    def kinds(self) -> list[str]:
        """The optimizer's kinds of state."""
        return sorted({kind for kind, _ in self._runs} - {MASTER})

    def names(self) -> set[str]:
        """Parameters that it holds."""
        return {name for kind, name in self._runs if kind == MASTER}

    def read(self, kind: str, name: str, start: int, count: int) -> Tensor:
        """Elements ``start`` and the ``count`` - 1 after it, flat fp32. Raises ConfigurationError for missing ones."""
        out = torch.empty(count, dtype=torch.float32)
        at, stop = start, start + count
        for begin, end, file, key in sorted(self._runs.get((kind, name), ()), key=lambda run: run[:2]):
            if begin <= at < min(end, stop):
                upto = min(end, stop)
                out[at - start : upto - start] = file.get_slice(key)[at - begin : upto - begin]
                at = upto
        if at < stop:
            raise ConfigurationError(
                f"{self._folder} lacks {kind} of {name} from element {at} on ({stop} wanted): it is of another model, "
                "or trained other parameters"
            )
        return out

    def check_names(self, wanted: Mapping[str, int]) -> None:
        """Refuse a state of other parameters. wanted: elements by name. Raises ConfigurationError."""
        missing, more = sorted(set(wanted) - self.names()), sorted(self.names() - set(wanted))
        if missing or more:
            raise ConfigurationError(
                f"{self._folder} is the state of other parameters: {len(missing)} are not in it "
                f"({', '.join(missing[:3])}), {len(more)} are not in the model ({', '.join(more[:3])})"
            )
        for name, count in wanted.items():
            held = max(end for _, end, _, _ in self._runs[MASTER, name])
            if held != count:
                raise ConfigurationError(
                    f"{self._folder}: {name} has {held} elements, the model's has {count}: it is of another model"
                )

    def restore_random(self, rank: int) -> None:
        """Set torch's generator as this rank's was; a rank that was not there keeps its own."""
        if rank < self.ranks:
            torch.set_rng_state(self._files[rank].get_tensor(_RANDOM))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"state-{rank:05d}.safetensors"
