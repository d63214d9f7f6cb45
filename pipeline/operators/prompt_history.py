"""What an operator remembers of single prompts: a small value for each, the last ones learned about, in its store.

In: a prompt and a value; out: the value again, after a restart too. The memory holds a set number of prompts; beyond
it the prompt that nothing was learned about for longest is forgotten, so that an endless stream takes bounded state.
"""

import json
from typing import Any

from headrace.pipeline.runtime.stage import Store
from headrace.schemas.records import Prompt

__all__ = ("PromptHistory",)

_PREFIX = b"prompt/"


class PromptHistory:
    """Plain JSON values by stream and prompt id; ``limit`` is the greatest number of prompts that are remembered."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[bytes, tuple[int, Any]] = {}
        """Number and value, in the order of learning, which is that of the numbers."""

    def __len__(self) -> int:
        """Prompts that are remembered."""
        return len(self._values)

    def load(self, store: Store) -> None:
        """Take what is remembered from a store."""
        saved = [(key, tuple(json.loads(value))) for key, value in store.scan(_PREFIX)]
        self._values = dict(sorted(saved, key=lambda entry: entry[1][0]))

    def get(self, prompt: Prompt) -> Any:
        """What is remembered of a prompt; None when nothing is."""
        return self._values.get(_key(prompt), (0, None))[1]

    def put(self, prompt: Prompt, value: Any, store: Store) -> None:
        """Remember; ``value`` is plain data."""
        key = _key(prompt)
        self._values.pop(key, None)
        number = next(reversed(self._values.values()))[0] + 1 if self._values else 0
        self._values[key] = (number, value)
        store.put(key, json.dumps([number, value], separators=(",", ":")).encode())
        if len(self._values) > self._limit:
            oldest = next(iter(self._values))
            del self._values[oldest]
            store.delete(oldest)

    def forget(self, prompt: Prompt, store: Store) -> None:
        """Remember nothing of a prompt any more."""
        key = _key(prompt)
        if self._values.pop(key, None) is not None:
            store.delete(key)


def _key(prompt: Prompt) -> bytes:
    return _PREFIX + f"{prompt.stream}\0{prompt.prompt_id}".encode()
