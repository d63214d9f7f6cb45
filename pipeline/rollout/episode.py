"""What an episode has sampled so far, to be saved when it is broken off and served when it is played again.

Goes in: the sequences of a Partial and the generations of the episode as they end; comes out: for a prompt that was
sampled before, what was sampled. An episode that is played again meets the same prompts in the same places as long as
its environment answers the same; where it does not, what was saved fits no prompt and is left out.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headrace.connectors.engines.engine import Generation
from headrace.schemas import parts
from headrace.schemas.parts import PolicyBound, Sampling
from headrace.schemas.records import Task

__all__ = ("Episode", "joined", "saved_sequence")


class Episode:
    """One attempt at one task. saved: sequences of an earlier attempt, finished ones and at most one broken off."""

    def __init__(self, task: Task | None = None, saved: Iterable[parts.Sequence] = ()) -> None:
        self.task = task
        self.written = 0
        """Sampled tokens in the newest Partial of this attempt."""
        self.served = 0
        """Sampled tokens that an earlier attempt had saved and this one took over."""
        self._saved = list(saved)
        self._finished: list[parts.Sequence] = []

    def take(self, prompt: npt.NDArray[np.int32], sampling: Sampling, bound: PolicyBound) -> Generation | None:
        """What was sampled for this prompt before, whole or broken off (end reason abort); each is served once.

        None when nothing was, with other parameters than now, or with versions that the bound does not allow.
        """
        for sequence in self._saved:
            oldest, newest = sequence.oldest_version, sequence.newest_version
            allowed = bound.min_version <= oldest and (not bound.pinned or newest == bound.min_version)
            n = sequence.prompt_length
            if (
                allowed
                and sequence.policy == bound.policy
                and replace(sequence.sampling, seed=-1) == replace(sampling, seed=-1)
                and np.array_equal(sequence.tokens[:n], prompt)
            ):
                self._saved.remove(sequence)
                self.served += sequence.tokens.size - n
                return Generation(
                    -1, sequence.end_reason, sequence.tokens[n:], sequence.logprobs[n:], sequence.versions[n:]
                )
        return None

    def note(self, prompt: npt.NDArray[np.int32], sampling: Sampling, policy: int, generation: Generation) -> None:
        """A generation has ended."""
        sequence = saved_sequence(prompt, sampling, policy, generation)
        if sequence is not None:
            self._finished.append(sequence)

    def sequences(self, running: Iterable[parts.Sequence]) -> list[parts.Sequence]:
        """For a Partial of this moment: what was saved and not asked for yet, what has ended, what is running."""
        return [*self._saved, *self._finished, *running]


def joined(before: Generation | None, after: Generation) -> Generation:
    """Two parts of one completion as one; it ends as the second does."""
    if before is None or not before.tokens.size:
        return after
    return replace(
        after,
        tokens=np.concatenate([before.tokens, after.tokens]),
        logprobs=np.concatenate([before.logprobs, after.logprobs]),
        versions=np.concatenate([before.versions, after.versions]),
    )


def saved_sequence(
    prompt: npt.NDArray[np.int32], sampling: Sampling, policy: int, generation: Generation
) -> parts.Sequence | None:
    """A generation as a Partial carries it; None when there is nothing to carry, or nothing that may travel."""
    made = generation.tokens.size
    if not made or not generation.known or not np.isfinite(generation.logprobs).all():
        return None
    size = prompt.size + made
    logprobs, mask, versions = np.zeros(size, np.float32), np.zeros(size, np.uint8), np.full(size, -1, np.int32)
    logprobs[prompt.size :], mask[prompt.size :], versions[prompt.size :] = generation.logprobs, 1, generation.versions
    return parts.Sequence(
        policy=policy,
        role="",
        prompt_length=prompt.size,
        end_reason=generation.end_reason,
        oldest_version=int(generation.versions.min()),
        newest_version=int(generation.versions.max()),
        sampling=sampling,
        tokens=np.concatenate([prompt, generation.tokens]).astype(np.int32),
        logprobs=logprobs,
        mask=mask,
        versions=versions,
    )
