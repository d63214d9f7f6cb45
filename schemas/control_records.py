"""The records that steer a run: demand, tasks, admissions, the ledger of credits (protocol 2, 3, 5).

All are small, so that ``schedule`` reads nothing else. Times are milliseconds since the epoch, -1 says none; a policy
is
its position in the run's configuration. ``sources`` name what a record was made from.
"""

from dataclasses import dataclass, field

from headrace.schemas.data_records import Prompt
from headrace.schemas.parts import (
    AdmittedPolicy,
    HeldTask,
    HostedPolicy,
    PolicyBound,
    Sampling,
    Source,
)

__all__ = (
    "CLOSE_REASONS",
    "TASK_KINDS",
    "Admission",
    "Batched",
    "Cancel",
    "Closed",
    "Demand",
    "Failed",
    "Kept",
    "NeedsScore",
    "Opened",
    "Resume",
    "RunEnd",
    "RunManifest",
    "Skipped",
    "Stop",
    "Suspend",
    "Taken",
    "Task",
    "Trained",
)

TASK_KINDS = ("train", "score", "eval")
CLOSE_REASONS = ("filtered", "failed", "stale", "evicted", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """What is fixed when a run is created (topic ``run``, key ``manifest``).

    ``partitions`` is the count of every topic; ``tokenizer_digest`` covers tokenizer, chat template and special tokens;
    ``schema_ids`` are the ids of schemas in the registry by fingerprint, empty without a registry.

    Example: RunManifest(run="first", created_ms=1, tokenizer_digest="9f..", policies=["main"], partitions={"tasks":
    64})
    """

    run: str
    created_ms: int
    tokenizer_digest: str
    policies: list[str]
    streams: list[str] = field(default_factory=list)
    partitions: dict[str, int] = field(default_factory=dict)
    config: str = ""
    schema_ids: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The run's end mark (topic ``run``, key ``end``), in the transaction of the Stops: who starts after it exits.

    Example: RunEnd(reason="steps", ended_ms=1764478800000)
    """

    reason: str
    ended_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """How far ``schedule`` has used a stream's prompts (topic ``run``), in runs of several streams.

    Prompts below ``position`` wait no more. A stream's source stays within a bounded stretch of it, so that no stream
    fills ``prompts`` while another one is owed.

    Example: Taken(stream="main", position=1042)
    """

    stream: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A snapshot of a rollout worker and its heartbeat (protocol 5); a later incarnation ends an earlier one's leases.

    ``capacity`` tasks may be held at once; ``next_sequence`` is the sequence number of the next Task it will read.

    Example: Demand(worker="rollout-0", incarnation=1764478800000, role="any", capacity=65, next_sequence=12, inbox=7,
    sent_ms=1764478800123, policies=[HostedPolicy(policy=0, version=4)], held=[])
    """

    worker: str
    incarnation: int
    role: str
    capacity: int
    next_sequence: int
    inbox: int
    sent_ms: int
    policies: list[HostedPolicy] = field(default_factory=list)
    held: list[HeldTask] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One replica of a prompt, leased to one incarnation of a worker until ``deadline_ms`` (protocol 5).

    ``kind`` is train, score or eval; for eval ``group`` numbers the evaluation task, for score ``members`` say where
    the
    trajectories lie. ``partial`` is the offset in ``partials`` (partition of the group) to go on from, -1 for none.

    Example: Task(kind="train", group=5, replica=0, attempt=0, stream="main", worker="rollout-0",
    incarnation=1764478800000, sequence=12, issued_ms=1, deadline_ms=60001, policies=[PolicyBound(policy=0,
    min_version=4)],
    prompt=Prompt(...))
    """

    kind: str
    group: int
    replica: int
    attempt: int
    stream: str
    worker: str
    incarnation: int
    sequence: int
    issued_ms: int
    deadline_ms: int
    partial: int = -1
    workflow: str = "single_turn"
    sampling: Sampling = field(default_factory=Sampling)
    policies: list[PolicyBound] = field(default_factory=list)
    prompt: Prompt
    members: list[Source] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The result of a task is not wanted; the worker drops it, in the engine too.

    Example: Cancel(kind="train", group=5, replica=7, attempt=0, worker="rollout-0", incarnation=1764478800000,
    reason="closed")
    """

    kind: str
    group: int
    replica: int
    attempt: int
    worker: str
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """A worker stops sampling and asks for no tasks until Resume.

    It keeps those that it has, or with ``hand_over`` writes their prefixes and gives up their leases: they are issued
    to others.

    Example: Suspend(worker="rollout-0", hand_over=True)
    """

    worker: str
    hand_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A suspended worker goes on.

    Example: Resume(worker="rollout-0")
    """

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The reader's part of the run is over: in ``tasks`` and ``admissions`` the whole run, in ``steps`` one policy.

    Example: Stop(reason="steps", policy=0)
    """

    reason: str
    policy: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A group is opened: the only record that does so (protocol 6). ``watermark``: all groups <= it have ended.

    Replicas are 0 .. group_size + extra_replicas - 1. ``retry`` is 1 when a failed group's prompt is admitted again.

    Example: Admission(group=5, prompt_id="7d0c8a3e4f2b1a90", stream="main", group_size=8, extra_replicas=0,
    admitted_ms=1, deadline_ms=180001, watermark=1, policies=[AdmittedPolicy(policy=0, min_version=4, cap=64)])
    """

    group: int
    prompt_id: str
    stream: str
    group_size: int
    extra_replicas: int
    admitted_ms: int
    deadline_ms: int
    watermark: int
    retry: int = 0
    task_type: str = ""
    policies: list[AdmittedPolicy] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The attempts of a replica (kind train) or of the group's score (kind score) are used up.

    Example: Failed(kind="train", group=5, replica=3, attempts=3, lost_leases=0, reason="env_error: reward raised")
    """

    kind: str
    group: int
    replica: int
    attempts: int
    lost_leases: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Ledger: a credit of a policy opens for a group, in the transaction of its Admission (protocol 3).

    Example: Opened(policy=0, group=5, stream="main", prompt_id="7d0c8a3e4f2b1a90", min_version=4, cap=64)
    """

    policy: int
    group: int
    stream: str
    prompt_id: str
    min_version: int
    cap: int
    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Ledger: an operator before rollout has dropped a prompt; no group opens for it in this epoch.

    ``reason`` is the operator's word for why, ``detail`` says the numbers that decided it. The ledger is that of the
    policy which the operator goes by.

    Example: Skipped(policy=0, stream="main", prompt_id="7d0c8a3e4f2b1a90", epoch=2, position=1041, operator="greso",
    reason="probably_easy", detail="3 groups in a row were easy; kept with 0.1250, drew 0.8123")
    """

    policy: int
    stream: str
    prompt_id: str
    epoch: int
    position: int
    operator: str
    reason: str
    detail: str = ""
    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Ledger: the group passed ``assemble`` and waits to be batched.

    ``raw_rewards`` are those of its counted members, by replica: what operators before rollout learn from.

    Example: Kept(policy=0, group=5, reward_mean=.5, reward_std=.53, raw_mean=.5, complete=True)
    """

    policy: int
    group: int
    reward_mean: float = 0.0
    reward_std: float = 0.0
    raw_mean: float = 0.0
    complete: bool = True
    raw_rewards: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsScore:
    """Ledger: the group has its members and waits for group-scope rewards.

    Example: NeedsScore(policy=0, group=5, members=[Source(topic="trajectories", partition=3, offset=17)])
    """

    policy: int
    group: int
    members: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Ledger: a credit ends without training. The first ending record of a credit counts (protocol 3).

    ``reason`` is one of CLOSE_REASONS, ``by`` the stage, ``operator`` and ``detail`` say which rule and why in words.
    ``raw_mean``, ``raw_std``, ``raw_rewards`` (of counted members, by replica) and ``tokens`` (trained ones) are of a
    group that had closed, 0 for one that had not.

    Example: Closed(policy=0, group=5, reason="filtered", by="assemble", operator="dynamic_sampling",
    detail="zero_variance: all 8 rewards are 1")
    """

    policy: int
    group: int
    reason: str
    by: str
    operator: str = ""
    detail: str = ""
    prompt_id: str = ""
    raw_mean: float = 0.0
    raw_std: float = 0.0
    tokens: int = 0
    complete: bool = True
    raw_rewards: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """Ledger: the fresh groups of a composed batch.

    Example: Batched(policy=0, batch=3, groups=[5, 6, 9])
    """

    policy: int
    batch: int
    groups: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Ledger: ``schedule`` has read the Step (or Resumed) of a batch; the first one >= a batch ends its credits.

    Example: Trained(policy=0, batch=3, version=3, first=True)
    """

    policy: int
    batch: int
    version: int
    first: bool
