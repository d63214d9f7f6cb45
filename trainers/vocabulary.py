"""The token ids that a model has, and the refusal of batches that hold others.

Goes in: a model folder, rows of a batch; comes out: nothing, or an error that names the trajectory. Without it a model
ends with an index error on a CPU, and on a GPU with an assertion that says neither what nor where.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Item
from headrace.trainers.batching import Row

__all__ = ("Vocabulary",)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids 0 to ``size`` - 1 of the model in ``folder``; size 0: not known."""

    folder: str
    size: int

    @classmethod
    def of(cls, folder: str) -> Self:
        """As the folder's config.json says, also where it describes the text part of a larger model apart."""
        try:
            config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
            return cls(folder, int(config.get("vocab_size") or config["text_config"]["vocab_size"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # who loads the model says what is wrong
            return cls(folder, 0)

    def check(self, rows: Sequence[Row], items: Sequence[Item]) -> None:
        """Raise ConfigurationError for a token that the model does not have. items: those that the rows are of."""
        if not self.size:
            return
        for row in rows:
            if len(row.tokens) and not (row.tokens.min() >= 0 and row.tokens.max() < self.size):
                wrong = (row.tokens < 0) | (row.tokens >= self.size)
                at, item = int(wrong.argmax()), items[row.item]
                raise ConfigurationError(
                    f"batch {item.batch}, lane {item.lane}: token {row.tokens[at]} at position {at} of group "
                    f"{item.group}, replica {item.replica} is none of the {self.size} of the model in {self.folder}: "
                    "whoever sampled it serves another model; put that right, then go back before this batch with "
                    "headrace run FOLDER --resume --from V --discard"
                )
