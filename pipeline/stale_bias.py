"""What dropping stale groups costs: how the dropped ones differ from the trained ones (protocol 4).

In: the records of a policy's ledger, in order. Out: means over dropped and over trained groups. Groups that had not
finished when they were dropped are counted apart: nobody knows what they would have earned, but they are the long ones.
"""

from dataclasses import dataclass, field

from headrace.schemas.records import Batched, Closed, Kept, Opened, Record

__all__ = ("StaleBias",)


@dataclass(slots=True)
class StaleBias:
    """Sums over groups that closed as stale and over those that were batched, fresh ones each."""

    unfinished: int = 0
    dropped: int = 0
    dropped_reward: float = 0.0
    dropped_tokens: int = 0
    batched: int = 0
    batched_reward: float = 0.0
    _open: set[int] = field(default_factory=set)
    _kept: dict[int, float] = field(default_factory=dict)
    """Mean raw reward of groups that are kept and have not ended."""

    def fold(self, record: Record) -> None:
        """Take one record; those of no interest are ignored."""
        match record:
            case Opened():
                self._open.add(record.group)
            case Kept():
                if record.group in self._open:
                    self._open.discard(record.group)
                    self._kept[record.group] = record.raw_mean
            case Batched():
                rewards = [self._kept.pop(g) for g in record.groups if g in self._kept]
                self.batched += len(rewards)
                self.batched_reward += sum(rewards)
            case Closed():
                finished, unfinished = record.group in self._kept, record.group in self._open
                self._kept.pop(record.group, None)
                self._open.discard(record.group)
                if record.reason == "stale" and finished:
                    self.dropped += 1
                    self.dropped_reward += record.raw_mean
                    self.dropped_tokens += record.tokens
                elif record.reason == "stale" and unfinished:
                    self.unfinished += 1
            case _:
                pass

    def figures(self, tokens_trained: float | None) -> dict[str, float]:
        """``groups`` dropped, ``unfinished`` ones among them, and mean ``reward`` and ``tokens`` of the finished ones
        beside those of the trained ones; empty when nothing was dropped.

        tokens_trained: mean trained tokens of a trained group.
        """
        if not self.dropped + self.unfinished:
            return {}
        out: dict[str, float] = {"groups": self.dropped + self.unfinished, "unfinished": self.unfinished}
        if self.dropped:
            out["reward"] = self.dropped_reward / self.dropped
            out["tokens"] = self.dropped_tokens / self.dropped
        if self.batched:
            out["reward_trained"] = self.batched_reward / self.batched
        if tokens_trained is not None:
            out["tokens_trained"] = tokens_trained
        return out
