"""The token ids that a model has: sequences with others are left out of a batch, by name.

Goes in: a model folder, rows of a batch; comes out: the rows that the model can take. Without this a model ends with an
index error on a CPU, and on a GPU with an assertion that says neither what nor where, at every restart.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

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

    def known(self, rows: Sequence[Row], items: Sequence[Item]) -> list[Row]:
        """The rows without a token that the model does not have; the others are said. items: those that rows are of.

        Raises ConfigurationError when none is left: then it is the model that is wrong, not a record.
        """
        kept = [row for row in rows if not self._foreign(row).any()]
        if len(kept) < len(rows):
            row = next(row for row in rows if self._foreign(row).any())
            at, item = int(self._foreign(row).argmax()), items[row.item]
            what = (
                f"{len(rows) - len(kept)} of {len(rows)} sequences of batch {item.batch} hold tokens that the model in "
                f"{self.folder} does not have; the first: token {row.tokens[at]} (of {self.size}) at position {at} of "
                f"group {item.group}, replica {item.replica}, in lane {item.lane}"
            )
            if not kept:
                raise ConfigurationError(f"{what}; policies.P.model is not what the workers sample from")
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {what}; they are left out\n")
        return kept

    def _foreign(self, row: Row) -> npt.NDArray[np.bool_]:
        return (row.tokens < 0) | (row.tokens >= self.size) if self.size else np.zeros(0, bool)
