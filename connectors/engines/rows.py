"""The running sequences of an engine as columns of arrays: what each row has sampled and when it must end.

Goes in: requests and, each step, a token and log-prob for every row; comes out: finished Generations. Rows stay dense,
so a step costs no Python work for a row that goes on.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from headrace.connectors.engines.engine import Generation, Request

__all__ = ("Rows", "drop_all", "drop_waiting")

_STOP, _LENGTH, _CONTEXT = 1, 2, 3
_REASONS = {_STOP: "stop", _LENGTH: "length", _CONTEXT: "context_full"}


class Rows:
    """State of up to ``capacity`` sequences; rows 0 .. count-1 are in use.

    stops: token ids that end a sequence (the token itself is kept). context: most tokens of prompt plus completion.
    """

    def __init__(self, capacity: int, stops: npt.NDArray[np.bool_], context: int) -> None:
        self._stops = stops
        self._context = context
        self.count = 0
        self.keys = np.zeros(capacity, np.int64)
        self.cached = np.zeros(capacity, np.int64)
        """Positions whose keys and values are in the cache."""
        self.last = np.zeros(capacity, np.int64)
        """The newest token, not yet in the cache."""
        self.produced = np.zeros(capacity, np.int64)
        self.before = np.zeros(capacity, np.int64)
        """Tokens of the completion that came with the request (``Request.made``)."""
        self.limit = np.zeros(capacity, np.int64)
        self.seed = np.zeros(capacity, np.int64)
        self.temperature = np.ones(capacity, np.float32)
        self.top_p = np.ones(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int32)
        self._tokens = np.zeros((capacity, 64), np.int32)
        self._logprobs = np.zeros((capacity, 64), np.float32)
        self._versions = np.zeros((capacity, 64), np.int32)

    def enter(self, requests: list[Request]) -> None:
        """Give rows to requests whose prompts are about to be put into the cache."""
        for row, request in enumerate(requests, self.count):
            sampling = request.sampling
            self.keys[row] = request.key
            self.cached[row] = request.prompt.size
            self.produced[row] = 0
            self.before[row] = request.made
            self.limit[row] = sampling.max_new_tokens - request.made
            self.seed[row] = sampling.seed
            self.temperature[row] = sampling.temperature
            self.top_p[row] = sampling.top_p
            self.top_k[row] = sampling.top_k
        self.count += len(requests)

    def append(
        self, rows: slice, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], version: int
    ) -> npt.NDArray[np.int8]:
        """Add one sampled token to each of ``rows``; returns for each why it ends now, 0 when it goes on."""
        made = self.produced[rows].copy()
        if made.size and int(made.max()) >= self._tokens.shape[1]:
            self._widen()
        index = np.arange(rows.start, rows.stop)
        self._tokens[index, made] = tokens
        self._logprobs[index, made] = logprobs
        self._versions[index, made] = version
        self.produced[rows] = made + 1
        self.last[rows] = tokens
        ends = np.zeros(tokens.size, np.int8)
        # cached + 1 is prompt plus completion: all but the newest token have been fed to the model
        ends[self.cached[rows] + 1 >= self._context] = _CONTEXT
        ends[made + 1 >= self.limit[rows]] = _LENGTH
        ends[self._stops[tokens]] = _STOP
        return ends

    def generation(self, row: int, end: int) -> Generation:
        """A row's tokens so far; ``end`` as from ``append``, 0 for an aborted one."""
        n = int(self.produced[row])
        return Generation(
            int(self.keys[row]),
            _REASONS.get(end, "abort"),
            self._tokens[row, :n].copy(),
            self._logprobs[row, :n].copy(),
            self._versions[row, :n].copy(),
        )

    def tokens(self, row: int) -> npt.NDArray[np.int32]:
        """What a row has sampled so far."""
        return self._tokens[row, : int(self.produced[row])]

    def everyone(self) -> list[Generation]:
        """What every row has so far (end reason abort); they all leave."""
        out = [self.generation(row, 0) for row in range(self.count)]
        self.count = 0
        return out

    def leave(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Free ``rows``; the last rows move into the holes. Returns (from, to), to be done in the cache as well."""
        left = self.count - rows.size
        target = rows[rows < left]
        source = np.setdiff1d(np.arange(left, self.count), rows, assume_unique=True)
        for column in self._columns():
            column[target] = column[source]
        self.count = left
        return source, target

    def find(self, key: int) -> int:
        """The row of a key, -1 when it has none."""
        found = np.flatnonzero(self.keys[: self.count] == key)
        return int(found[0]) if found.size else -1

    def _columns(self) -> list[npt.NDArray[np.generic]]:
        return [
            self.keys, self.cached, self.last, self.produced, self.before, self.limit, self.seed, self.temperature,
            self.top_p, self.top_k, self._tokens, self._logprobs, self._versions,
        ]  # fmt: skip

    def _widen(self) -> None:
        for name in ("_tokens", "_logprobs", "_versions"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)], 1))


def drop_all(waiting: deque[Request]) -> list[Generation]:
    """Empty the queue; an empty Generation for each request in it."""
    out = [Generation(request.key, "abort") for request in waiting]
    waiting.clear()
    return out


def drop_waiting(waiting: deque[Request], key: int) -> Generation | None:
    """Take a request that has no row yet out of the queue; an empty Generation, or None when it is not in it."""
    for request in waiting:
        if request.key == key:
            waiting.remove(request)
            return Generation(key, "abort")
    return None
