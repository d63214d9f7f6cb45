"""Prompts that wait to be admitted, per stream, and which stream is next (protocol 3).

The buffer is small: ``prompts`` is paused above a mark and goes on below another. A prompt whose group failed comes
back behind everything that waits at that moment.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from headrace.pipeline.credits import PolicyCredits
from headrace.pipeline.runtime.stage import Store
from headrace.pipeline.state import key_of, numbers_of, pack, unpack
from headrace.schemas.config import RunConfig
from headrace.schemas.records import Prompt

__all__ = ("PAUSE_ABOVE", "RESUME_BELOW", "Waiting", "WaitingPrompt", "openings")

PAUSE_ABOVE, RESUME_BELOW = 256, 192
"""Waiting prompts above which ``prompts`` is paused and below which it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPrompt:
    """A prompt, its offset in ``prompts``, and for a retry the policies that still want it (empty: all)."""

    number: int
    prompt: Prompt
    offset: int
    retry: int = 0
    policies: tuple[int, ...] = ()


class Waiting:
    """Prompts in order of arrival, written through to the store."""

    def __init__(self) -> None:
        self.by_stream: dict[str, deque[WaitingPrompt]] = {}
        self.count = 0
        self.paused = False
        self._next = 0

    def load(self, store: Store) -> None:
        """Take the waiting prompts from a store."""
        for key, value in store.scan(b"waiting/"):
            note, prompt = unpack(value)
            assert isinstance(prompt, Prompt)
            number = numbers_of(key)[0]
            self._append(WaitingPrompt(number=number, prompt=prompt, **{**note, "policies": tuple(note["policies"])}))

    def add(self, prompt: Prompt, offset: int, store: Store, *, retry: int = 0, policies: tuple[int, ...] = ()) -> None:
        """Put a prompt behind everything that waits."""
        waiting = WaitingPrompt(number=self._next, prompt=prompt, offset=offset, retry=retry, policies=policies)
        note = {"offset": offset, "retry": retry, "policies": policies}
        store.put(key_of("waiting", waiting.number), pack(note, prompt))
        self._append(waiting)

    def take(self, stream: str, store: Store) -> WaitingPrompt:
        """Remove the first prompt of a stream."""
        queue = self.by_stream[stream]
        waiting = queue.popleft()
        if not queue:
            del self.by_stream[stream]
        self.count -= 1
        store.delete(key_of("waiting", waiting.number))
        return waiting

    def heads(self) -> list[WaitingPrompt]:
        """The first prompt of every stream that has one, oldest first."""
        return sorted((queue[0] for queue in self.by_stream.values()), key=lambda w: w.number)

    def wants_pause(self, absent: Collection[str] = ()) -> bool:
        """Whether reading ``prompts`` should stand still; not while prompts of ``absent`` streams are sought.

        What is read then is bounded by how far the sources of the others may go ahead (STREAM_LEAD there).
        """
        if self.count > PAUSE_ABOVE:
            self.paused = True
        elif self.count < RESUME_BELOW:
            self.paused = False
        return self.paused and not (absent and self.by_stream)

    def _append(self, waiting: WaitingPrompt) -> None:
        self.by_stream.setdefault(waiting.prompt.stream, deque()).append(waiting)
        self._next = waiting.number + 1
        self.count += 1


def openings(
    name: str, only: Collection[int], config: RunConfig, policies: list[PolicyCredits]
) -> list[tuple[int, int]]:
    """(policy, cap in force) of every credit that a prompt of a stream would open at this moment; empty: not yet.

    ``only``: the policies that a retry is for; empty: all of the stream.
    ``pacing`` of the stream decides when: any policy with room, all of them, or a named one. Only policies with room
    get a credit (protocol 3); stopped policies do not count.
    """
    stream = config.streams[name]
    wanted = [p for p in config.stream_policies(name) if not only or p in only]
    active = [p for p in wanted if not policies[p].stopped]
    rooms = {p: policies[p].room() for p in active}
    ready = [(p, rooms[p][1]) for p in active if rooms[p][0]]
    if stream.pacing == "all" and len(ready) < len(active):
        return []
    if stream.pacing not in ("any", "all"):
        index = config.policy_names().index(stream.pacing)
        leader = index if index in active else next(iter(active), -1)
        if leader not in [p for p, _ in ready]:
            return []
    return ready
