"""What every workflow must keep, tried on scripted policies: whole trajectories, seeds that decide, failures that tell.

In: a name or ``module:attribute`` with its options. Out: one ``Check`` for every promise of ``workflow.Workflow``. Two
policies answer with text that follows from prompt, policy and seed; the reward follows from the answer.
"""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.connectors.conformance import Check, attempt
from headrace.connectors.engines.engine import Generation
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.workflow import Workflow, make_workflow
from headrace.schemas import codec
from headrace.schemas.checks import check_record
from headrace.schemas.parts import PolicyBound, Reward, Sampling
from headrace.schemas.records import Prompt, Task, Trajectory

__all__ = ("conformance",)

POLICIES = {"first": 0, "second": 1}
_SECONDS = 20.0
_VERSION = 6


class Broken(Exception):
    """What a policy raises that cannot sample."""


class Session:
    """A policy without a model; see ``workflow.PolicySession``. Text is UTF-8, a token is a byte plus 4."""

    def __init__(self, policy: int, *, fails: bool = False, hangs: bool = False) -> None:
        self.policy = policy
        self.calls = 0
        self._fails, self._hangs = fails, hangs

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Token ids of a prompt."""
        return self.tokenize(prompt.prompt or "\n".join(m.content for m in prompt.messages))

    def decode(self, tokens: npt.NDArray[np.int32]) -> str:
        """Text of token ids."""
        return bytes((np.asarray(tokens, dtype=np.int64) - 4).clip(0, 255).astype(np.uint8)).decode("utf-8", "replace")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages as lines."""
        return "".join(f"{m.get('role')}: {m.get('content') or ''}\n" for m in messages) + "assistant: "

    def tokenize(self, text: str) -> npt.NDArray[np.int32]:
        """Bytes as tokens."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32) + 4

    def detokenize(self, tokens: npt.NDArray[np.int32]) -> str:
        """Text of token ids."""
        return self.decode(tokens)

    async def generate(self, prompt: npt.NDArray[np.int32], sampling: Sampling) -> Generation:
        """An answer that follows from policy, prompt and seed."""
        self.calls += 1
        await asyncio.sleep(3600 if self._hangs else 0)
        if self._fails:
            raise Broken("the policy cannot sample")
        seed = zlib.crc32(prompt.tobytes() + f"{self.policy} {sampling.seed}".encode())
        answers = ("2", "3", "<verify>approve</verify>", "<verify>reject</verify>", "<final>A</final>", "I do not know")
        tokens = self.tokenize(answers[seed % len(answers)])[: max(1, sampling.max_new_tokens)]
        return Generation(
            1, "stop", tokens=tokens, logprobs=np.full(tokens.size, -0.5, np.float32),
            versions=np.full(tokens.size, _VERSION, np.int32),
        )  # fmt: skip


class Judge:
    """1 for the right answer; see ``workflow.Scoring``."""

    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        """One part."""
        await asyncio.sleep(0)
        return [Reward(name="judge", value=float(completion.text == prompt.answer), role=role)]


def conformance(name: str, settings: Mapping[str, Any]) -> list[Check]:
    """Try a workflow. Raises ConfigurationError for an unknown name and options that it refuses."""
    workflow = make_workflow(name, settings, POLICIES)
    return [
        attempt("trajectories", lambda: _trajectories(workflow)),
        attempt("seeds", lambda: _seeds(workflow, make_workflow(name, settings, POLICIES))),
        attempt("together", lambda: _together(workflow)),
        attempt("failure", lambda: _failure(workflow)),
        attempt("cancel", lambda: _cancel(workflow)),
    ]


def _task(seed: int) -> Task:
    prompt = Prompt(
        prompt_id=f"{seed:016x}", stream="main", dataset="conformance", row=seed, epoch=0, position=seed, prompt="1+1=",
        answer="2",
    )  # fmt: skip
    return Task(
        kind="train", group=seed, replica=1, attempt=2, stream="main", worker="w0", incarnation=1, sequence=seed,
        issued_ms=0, deadline_ms=1 << 50, sampling=Sampling(temperature=1.0, max_new_tokens=64, seed=seed),
        policies=[PolicyBound(policy=p, min_version=_VERSION) for p in POLICIES.values()], prompt=prompt,
    )  # fmt: skip


def _sessions(**more: Any) -> dict[int, Session]:
    return {policy: Session(policy, **more) for policy in POLICIES.values()}


async def _played(workflow: Workflow, task: Task) -> Trajectory:
    made = await asyncio.wait_for(workflow.run(task, _sessions(), Judge()), _SECONDS)
    return replace(made, started_ms=0, finished_ms=0)


def _plain(trajectory: Trajectory) -> Any:
    return codec.to_plain(trajectory)


def _trajectories(workflow: Workflow) -> str:
    tokens = 0
    for seed in range(8):
        task = _task(seed)
        made = asyncio.run(_played(workflow, task))
        assert isinstance(made, Trajectory), f"it gives a {type(made).__name__}, no Trajectory"
        check_record(made)
        codec.decode(codec.encode(made))
        told = (made.group, made.replica, made.attempt, made.worker, made.incarnation, made.prompt_id)
        asked = (task.group, task.replica, task.attempt, task.worker, task.incarnation, task.prompt.prompt_id)
        assert told == asked, f"the trajectory is of {told}, the task of {asked}"
        assert made.status == "train", f"seed {seed}: it is {made.status}: {made.error or made.end_reason}"
        assert made.sequences, "it has no sequence"
        for sequence in made.sequences:
            assert sequence.policy in POLICIES.values(), f"a sequence is of policy {sequence.policy}, which has no part"
            assert sequence.role, "a sequence has no role"
            sampled = sequence.versions[sequence.mask == 1]
            assert (sampled == _VERSION).all(), "trained tokens bear another version than the one that sampled them"
        trained = sum(int(s.mask.sum()) for s in made.sequences)
        assert made.tokens == trained, f"it says {made.tokens} trained tokens and has {trained}"
        tokens += trained
    assert tokens, "no token is trained"
    return f"8 episodes of {tokens} trained tokens, each of its task and of its policies"


def _seeds(workflow: Workflow, other: Workflow) -> str:
    for seed in range(4):
        first = _plain(asyncio.run(_played(workflow, _task(seed))))
        assert _plain(asyncio.run(_played(workflow, _task(seed)))) == first, f"seed {seed} gives another episode again"
        assert _plain(asyncio.run(_played(other, _task(seed)))) == first, f"seed {seed} is another in another instance"
    return "equal tasks give equal trajectories, also in another instance"


def _together(workflow: Workflow) -> str:
    """Episodes of one worker overlap: none may leave a trace in another."""

    async def all_at_once() -> list[Trajectory]:
        return list(await asyncio.gather(*(_played(workflow, _task(seed)) for seed in range(6))))

    overlapping = [_plain(made) for made in asyncio.run(all_at_once())]
    alone = [_plain(asyncio.run(_played(workflow, _task(seed)))) for seed in range(6)]
    assert overlapping == alone, "episodes that overlap give other trajectories than one after the other"
    return "six episodes at once give what they give alone"


def _failure(workflow: Workflow) -> str:
    """A policy that cannot sample must not become an answer of reward 0."""

    async def play() -> Trajectory | BaseException:
        episode = workflow.run(_task(1), _sessions(fails=True), Judge())
        (ended,) = await asyncio.gather(asyncio.wait_for(episode, _SECONDS), return_exceptions=True)
        return ended

    made = asyncio.run(play())
    assert not isinstance(made, TimeoutError), "a policy that cannot sample makes it hang"
    if isinstance(made, BaseException):  # what a worker takes as the reason to exclude the trajectory
        return f"a policy that cannot sample ends the episode: {type(made).__name__}"
    assert made.status == "excluded", f"a policy that cannot sample gives a usable trajectory of reward {made.reward:g}"
    return f"a policy that cannot sample gives an excluded trajectory: {made.error or made.end_reason}"


def _cancel(workflow: Workflow) -> str:
    async def play() -> str:
        sessions = _sessions(hangs=True)
        episode = asyncio.ensure_future(workflow.run(_task(1), sessions, Judge()))
        for _ in range(200):
            await asyncio.sleep(0)
            if any(session.calls for session in sessions.values()):
                break
        assert not episode.done(), "it ends although its policies hang"
        episode.cancel()
        done, _ = await asyncio.wait([episode], timeout=2.0)
        assert done, "it goes on when it is cancelled"
        assert episode.cancelled() or episode.exception() is not None, "it gives a trajectory when it is cancelled"
        return "a cancelled episode ends at once"

    return asyncio.run(play())
