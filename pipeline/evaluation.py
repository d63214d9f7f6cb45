"""Evaluation tasks: the held-out prompts of a run, and which version is due to be evaluated (protocol 5).

Prompts of the stream ``@eval`` stand before all others in ``prompts``. Version 0 is evaluated before anything is
trained, then every ``eval.every`` versions, and the last version when its policy has stopped.
"""

from headrace.pipeline.leases import Work
from headrace.pipeline.runtime.stage import Store
from headrace.pipeline.state import key_of, pack, read_json, unpack, write_json
from headrace.schemas.config import EvalConfig
from headrace.schemas.records import Prompt

__all__ = ("EVALUATION_STREAM", "Evaluation", "is_due")

EVALUATION_STREAM = "@eval"
"""Prompt.stream of held-out prompts."""
_BEFORE = -(1 << 40)
"""Places of tasks that go before all groups begin here."""


def is_due(config: EvalConfig, version: int) -> bool:
    """Whether a version is one of those evaluated along the way."""
    return config.every > 0 and version % config.every == 0


class Evaluation:
    """The held-out prompts and what has been evaluated, written through to the store."""

    def __init__(self, config: EvalConfig, policies: int) -> None:
        self.config = config
        self.prompts: list[Prompt] = []
        self.complete = False
        self.last = dict.fromkeys(range(policies), -1)
        """Version evaluated last, per policy."""
        self.next_number = 0

    def load(self, store: Store) -> None:
        """Take the state from a store."""
        for _, value in store.scan(b"heldout/"):
            prompt = unpack(value)[1]
            assert isinstance(prompt, Prompt)
            self.prompts.append(prompt)
        saved = read_json(store, b"evaluation")
        if saved:
            self.complete, last, self.next_number = saved
            self.last = {int(p): v for p, v in last.items()}

    def add(self, prompt: Prompt, store: Store) -> None:
        """Keep a held-out prompt."""
        store.put(key_of("heldout", len(self.prompts)), pack(None, prompt))
        self.prompts.append(prompt)

    def close(self, store: Store) -> bool:
        """The held-out prompts are complete; true when this is news and there are any."""
        if self.complete:
            return False
        self.complete = True
        self._save(store)
        return bool(self.prompts)

    def due(self, version: int) -> bool:
        """Whether a policy's version is one of those evaluated along the way."""
        return is_due(self.config, version)

    def issue(self, policy: int, version: int, next_group: int, store: Store) -> list[Work]:
        """The tasks that evaluate a version; none when it was evaluated already or nothing is held out.

        ``after`` puts them behind the groups admitted so far, ``before`` and version 0 before all groups; what is
        issued earlier goes first, so that a worker that pins versions loads each once.
        """
        if not self.complete or not self.prompts or self.last[policy] >= version:
            return []
        self.last[policy] = version
        first = version == 0 or self.config.priority == "before"
        order = _BEFORE + self.next_number if first else next_group
        tasks: list[Work] = []
        for index in range(len(self.prompts)):
            detail = {"policy": policy, "version": version, "prompt": index}
            tasks += [
                Work(kind="eval", group=self.next_number, replica=sample, order=order, detail=dict(detail))
                for sample in range(self.config.samples)
            ]
            self.next_number += 1
        self._save(store)
        return tasks

    def _save(self, store: Store) -> None:
        write_json(store, b"evaluation", (self.complete, self.last, self.next_number))
