"""Rewards by a judge, any model behind an OpenAI-compatible endpoint: ``judge``, ``pairwise`` and ``ranking``.

Goes in: the completions of a prompt; comes out: a number for each, or why it has none: a completion whose judgement
fails is excluded from its group, and the others keep theirs.
"""

import itertools
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field

from headrace.pipeline.environments.actions import after_thinking
from headrace.pipeline.rewards.chat_client import ChatClient, ChatOptions, JudgeUnavailable
from headrace.pipeline.rewards.reward import Completion, Graded, RewardFailed, RewardOptions
from headrace.schemas.records import Prompt

__all__ = ("Judge", "JudgeOptions", "Pairwise", "PairwiseOptions", "Ranking", "question_of")

_Answer = TypeVar("_Answer")

_MARKED = re.compile(r"(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+(?:\.\d+)?)?")
"""A mark, of 8, 8/10 and 8 out of 10 the 8."""
_MARK = "Question:\n{question}\n\nReference answer (may be empty):\n{answer}\n\nReply to be judged:\n{completion}\n\n"
_PAIR = "Question:\n{question}\n\nReference answer (may be empty):\n{answer}\n\nReply A:\n{a}\n\nReply B:\n{b}\n\n"
_LIST = "Question:\n{question}\n\nReference answer (may be empty):\n{answer}\n\n{replies}\n\n"


class JudgeOptions(ChatOptions):
    """Options of ``judge``, ``pairwise`` and ``ranking``."""

    instructions: str = ""
    """Said to the judge before all; empty: a plain request to judge by correctness and use."""
    lowest: float = 0.0
    highest: float = 10.0
    """Marks of ``judge``; they become 0 .. 1, and marks outside count as none."""
    parallel: int = Field(8, ge=1)
    """Requests of one group at a time."""


class PairwiseOptions(JudgeOptions):
    """Options of ``pairwise``."""

    pairs: int = Field(0, ge=0)
    """Pairs that are compared, chosen by the prompt; 0: all. Every pair is asked in both orders."""


class _Judging:
    """What all judges share. Runs in a thread: each request has a time of its own."""

    Options: ClassVar[type[RewardOptions]] = JudgeOptions
    scope: ClassVar[Literal["trajectory", "group"]] = "group"
    isolation: ClassVar[Literal["process", "inline", "thread"]] = "thread"

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        self._client = ChatClient(options)

    @property
    def spent(self) -> Mapping[str, int]:
        """Requests, tries, tokens and millionths of the currency that the prices are in."""
        return self._client.spent

    def _ask(self, text: str, task: str) -> str:
        instructions = self._options.instructions or "You judge replies by how right and how useful they are."
        return self._client.ask([{"role": "system", "content": instructions}, {"role": "user", "content": text + task}])

    def _each(self, ask: Callable[[Any], _Answer], things: Sequence[Any]) -> "list[_Answer | RewardFailed]":
        """The answers for all things, some at a time; a failure in place of each that has none."""
        with ThreadPoolExecutor(min(self._options.parallel, max(1, len(things))), "judge") as threads:
            return list(threads.map(lambda thing: _answer_or_failure(ask, thing), things))


def _answer_or_failure(ask: Callable[[Any], _Answer], thing: Any) -> "_Answer | RewardFailed":
    try:
        return ask(thing)
    except (JudgeUnavailable, ValueError) as error:
        return RewardFailed(str(error))


class Judge(_Judging):
    """Reward ``judge``: a mark for each completion by itself."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Graded | RewardFailed]:
        """Marks from 0 to 1."""
        low, high = self._options.lowest, self._options.highest
        task = f"Give the reply a mark from {low:g} (worst) to {high:g} (best). Answer with the number alone."

        def marked(completion: Completion) -> Graded:
            said = self._ask(_filled(_MARK, prompt, completion=completion.text), task)
            found = _MARKED.findall(after_thinking(said))
            mark = float(found[-1]) if found else None
            if mark is None or not low <= mark <= high:
                raise ValueError(f"judge {self._options.model} gave no mark from {low:g} to {high:g}: {said[:200]!r}")
            return Graded({"judge": (mark - low) / (high - low)}, {"judge": said[:500]})

        return self._each(marked, completions)


class Pairwise(_Judging):
    """Reward ``pairwise``: the share of comparisons with others of its group that a completion wins; a tie is half one.

    Each pair is asked in both orders, so that a judge which likes the first reply gives both a half.
    """

    Options: ClassVar[type[RewardOptions]] = PairwiseOptions

    def __init__(self, options: PairwiseOptions) -> None:
        super().__init__(options)
        self._pairs = options.pairs

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Graded | RewardFailed]:
        """Shares from 0 to 1; a completion without one comparison has none."""
        pairs = list(itertools.combinations(range(len(completions)), 2))
        if self._pairs and self._pairs < len(pairs):
            pairs = random.Random(zlib.crc32(prompt.prompt_id.encode())).sample(pairs, self._pairs)
        orders = [order for a, b in pairs for order in ((a, b), (b, a))]

        def better(order: tuple[int, int]) -> float:
            a, b = (completions[i].text for i in order)
            said = self._ask(_filled(_PAIR, prompt, a=a, b=b), "Which reply is better? Answer A, B or tie alone.")
            word = after_thinking(said).strip().strip(".\"'*()").upper().removeprefix("REPLY ")
            if word not in ("A", "B", "TIE"):
                raise ValueError(f"judge {self._options.model} answered neither A, B nor tie: {said[:200]!r}")
            return {"A": 1.0, "B": 0.0, "TIE": 0.5}[word]

        won: list[list[float]] = [[] for _ in completions]
        lost: list[str] = [""] * len(completions)
        for (a, b), value in zip(orders, self._each(better, orders), strict=True):
            if isinstance(value, RewardFailed):
                lost[a] = lost[b] = str(value)
                continue
            won[a].append(value)
            won[b].append(1 - value)
        return [
            Graded({"pairwise": sum(w) / len(w)}, {"pairwise": f"{len(w)} comparisons"})
            if w
            else RewardFailed(why or "it was compared with nothing")
            for w, why in zip(won, lost, strict=True)
        ]


class Ranking(_Judging):
    """Reward ``ranking``: all completions in one request, ordered by the judge; 1 for the best, 0 for the worst."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Evenly spaced values. Raises RewardFailed for an answer that is no order of all of them."""
        count = len(completions)
        replies = "\n\n".join(f"Reply {i}:\n{c.text}" for i, c in enumerate(completions, 1))
        task = f"Order the replies 1 to {count} from best to worst. Answer with their numbers alone, by commas."
        try:
            said = self._ask(_filled(_LIST, prompt, replies=replies), task)
        except JudgeUnavailable as error:
            raise RewardFailed(str(error)) from error
        order = [int(number) for number in re.findall(r"\d+", after_thinking(said))]
        if sorted(order) != list(range(1, count + 1)):
            raise RewardFailed(f"judge {self._options.model} gave no order of {count} replies: {said[:200]!r}")
        worth = {reply: 1.0 if count == 1 else 1 - place / (count - 1) for place, reply in enumerate(order)}
        return [worth[i] for i in range(1, count + 1)]


def question_of(prompt: Prompt) -> str:
    """What was asked, as a judge reads it."""
    return prompt.prompt or "\n".join(f"{m.role}: {m.content}" for m in prompt.messages)


def _filled(form: str, prompt: Prompt, **parts: str) -> str:
    """A form with its parts, none of which is looked at for further places."""
    values = {"question": question_of(prompt), "answer": prompt.answer, **parts}
    return re.sub(r"\{(\w+)\}", lambda place: values[place[1]], form)
