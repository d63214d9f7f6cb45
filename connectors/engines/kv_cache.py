"""Keys and values of the running sequences, one row each, dense: rows 0 .. n-1 are in use and end where each is.

A transformers model writes through ``update`` as it would into its own cache. Column = position, so a row needs no
padding; a sequence that leaves is overwritten by the last row. Guarantee: a row's keys and values are never moved
along the sequence, and nothing of a sequence that left is ever attended to (the mask of the engine ends at the row's
own length).
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ("KeyValueCache",)


class KeyValueCache:
    """What a model's forward is given as ``past_key_values``.

    rows: most sequences at once. Memory grows by doubling with the longest sequence: 2 x layers x rows x heads x
    columns x head size elements. Call ``begin_prefill`` or ``begin_decode`` before each forward.
    """

    is_compileable = False

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._prefill = True
        self._first = 0
        self._index: tuple[torch.Tensor, torch.Tensor] | None = None
        self._width = 0
        self._columns = 0

    def begin_prefill(self, first: int, width: int) -> None:
        """The next forward holds whole prompts for rows ``first`` onward, padded on the right to ``width`` columns."""
        self._prefill, self._first, self._width = True, first, width
        self._reserve(width)

    def begin_decode(self, lengths: "torch.Tensor", width: int) -> None:
        """The next forward holds one token for each of rows 0 .. n-1, at ``lengths``; ``width``: 1 + their maximum."""
        import torch

        self._prefill, self._width = False, width
        self._index = (torch.arange(lengths.shape[0], device=lengths.device), lengths)
        self._reserve(width)

    def update(
        self, key_states: "torch.Tensor", value_states: "torch.Tensor", layer_idx: int, *_: object, **__: object
    ) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Store the new keys and values (rows, heads, tokens, head size) and return all that may be attended to."""
        if layer_idx == len(self._layers):
            shape = (self._rows, key_states.shape[1], self._columns, key_states.shape[3])
            values = value_states.new_zeros(*shape[:3], value_states.shape[3])
            self._layers.append((key_states.new_zeros(shape), values))
        keys, values = self._layers[layer_idx]
        if self._prefill:
            rows = slice(self._first, self._first + key_states.shape[0])
            keys[rows, :, : self._width] = key_states
            values[rows, :, : self._width] = value_states
            return key_states, value_states
        assert self._index is not None
        row, position = self._index
        keys[row, :, position] = key_states[:, :, 0]
        values[row, :, position] = value_states[:, :, 0]
        n = key_states.shape[0]
        return keys[:n, :, : self._width], values[:n, :, : self._width]

    def move(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], width: int) -> None:
        """Copy rows ``source`` over rows ``target``, ``width`` columns of them."""
        if source.size == 0:
            return
        import torch

        for keys, values in self._layers:
            for tensor in (keys, values):
                s, t = torch.from_numpy(source).to(tensor.device), torch.from_numpy(target).to(tensor.device)
                tensor[t, :, :width] = tensor[s, :, :width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the next forward's tokens; positions are always given to the model, so this is 0."""
        return 0

    def _reserve(self, width: int) -> None:
        if width <= self._columns:
            return
        self._columns = max(64, 2 * self._columns, width)
        for i, pair in enumerate(self._layers):
            grown = [t.new_zeros(t.shape[0], t.shape[1], self._columns, t.shape[3]) for t in pair]
            for old, new in zip(pair, grown, strict=True):
                new[:, :, : old.shape[2]] = old
            self._layers[i] = (grown[0], grown[1])
