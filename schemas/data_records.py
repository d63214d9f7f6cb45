"""The records that carry data: prompts, trajectories, groups, batches, steps, versions (protocol 2, 6, 8).

Scalars come first, then text, then nested parts and token arrays; times are milliseconds since the epoch, -1 says none.
``checks.py`` holds the rules that a record must obey to travel.
"""

from dataclasses import dataclass, field

from headrace.schemas.parts import (
    BlobRef,
    Lane,
    ManifestMember,
    MemberScore,
    Message,
    Reward,
    RolePart,
    RoleStatistics,
    Sequence,
    Source,
)

__all__ = (
    "END_REASONS",
    "MEMBER_STATUSES",
    "End",
    "EvalResult",
    "Group",
    "Head",
    "Item",
    "Manifest",
    "Member",
    "Partial",
    "Prompt",
    "Resumed",
    "Rollback",
    "Score",
    "Step",
    "Trajectory",
)

END_REASONS = ("stop", "length", "context_full", "abort", "env_timeout", "env_error", "tool_error")
"""Why a sequence ended. Default: stop, length train, context_full masks, the others exclude the trajectory."""
MEMBER_STATUSES = ("train", "baseline_only", "excluded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a stream: ``prompt`` text, or chat ``messages``. ``position`` counts a source's prompts from 0.

    Example: Prompt(prompt_id="7d0c8a3e4f2b1a90", stream="main", dataset="train.jsonl", row=3, epoch=0, position=3,
    prompt="52436=", answer="23456", reward="exact_match")
    """

    prompt_id: str
    stream: str
    dataset: str
    row: int
    epoch: int
    position: int
    task_type: str = ""
    reward: str = ""
    prompt: str = ""
    answer: str = ""
    messages: list[Message] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No more records of the topic's main kind follow in this partition (prompts, ledger, manifests).

    Example: End(reason="epochs", count=512)
    """

    reason: str
    count: int = -1
    stream: str = ""
    policy: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The result of one attempt at one replica: sequences per policy and role, named rewards (protocol 2, 5).

    ``status`` is train or excluded (then ``error`` says why and sequences may be empty). ``reward`` is what the episode
    came to: the sum of the parts of the whole trajectory, unless its workflow says otherwise. ``metrics`` are figures
    of the workflow for people. Above 1 MB the arrays lie in the object store and ``blob`` points there; then
    ``sequences`` is empty, and ``oldest_versions`` and ``roles`` still tell the oldest version per policy and who
    played what.

    Example: Trajectory(group=5, replica=0, attempt=0, worker="rollout-0", incarnation=1764478800000, stream="main",
    prompt_id="7d0c8a3e4f2b1a90", status="train", end_reason="stop", reward=1.0, tokens=6, started_ms=1, finished_ms=80,
    prompt_text="52436=", completion_text="23456", rewards=[Reward(name="exact_match", value=1.0)], sequences=[...])
    """

    group: int
    replica: int
    attempt: int
    worker: str
    incarnation: int
    stream: str
    prompt_id: str
    status: str
    end_reason: str
    reward: float
    tokens: int
    started_ms: int
    finished_ms: int
    task_type: str = ""
    error: str = ""
    prompt_text: str = ""
    completion_text: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: list[Reward] = field(default_factory=list)
    oldest_versions: dict[str, int] = field(default_factory=dict)
    roles: list[RolePart] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    blob: BlobRef | None = None
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The group-scope rewards of a group's members, by a score task; ``metrics``: what judges cost meanwhile.

    Example: Score(group=5, worker="rollout-0", finished_ms=90, scores=[MemberScore(replica=0, name="judge", value=.5)])
    """

    group: int
    worker: str
    finished_ms: int
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    scores: list[MemberScore] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """The prefix of an aborted trajectory, to be resumed by whoever gets the next attempt.

    Example: Partial(group=5, replica=0, attempt=0, worker="rollout-0", incarnation=1764478800000, written_ms=70,
    sequences=[...])
    """

    group: int
    replica: int
    attempt: int
    worker: str
    incarnation: int
    written_ms: int
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The part of one trajectory that belongs to one policy, as a member of a closed group (protocol 6).

    ``status``: train, baseline_only (counts in the statistics, is not trained), excluded (counts nowhere).
    ``length`` is the count of tokens with mask 1.

    Example: Member(policy=0, group=5, replica=0, attempt=0, stream="main", prompt_id="7d0c8a3e4f2b1a90",
    status="train",
    raw_reward=1.0, shaped_reward=1.0, length=6, oldest_version=7, newest_version=8, end_reason="stop", sequences=[...])
    """

    policy: int
    group: int
    replica: int
    attempt: int
    stream: str
    prompt_id: str
    status: str
    raw_reward: float
    shaped_reward: float
    length: int
    oldest_version: int
    newest_version: int
    end_reason: str
    error: str = ""
    rewards: list[Reward] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    blob: BlobRef | None = None
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A closed and kept group of one policy; its ``members`` Members stand before it in the same transaction.

    Statistics are over members with status train or baseline_only (``counted``): mean and unbiased standard deviation
    of shaped and of raw rewards. ``roles`` has those of shaped rewards by role, where the policy plays several that are
    rewarded apart. ``short`` says that fewer than the admitted group size were usable.

    Example: Group(policy=0, group=5, stream="main", prompt_id="7d0c8a3e4f2b1a90", members=8, counted=8, trained=8,
    short=False, reward_mean=.5, reward_std=.53, raw_mean=.5, raw_std=.53, oldest_version=7, newest_version=8,
    tokens=50, closed_ms=90)
    """

    policy: int
    group: int
    stream: str
    prompt_id: str
    members: int
    counted: int
    trained: int
    short: bool
    reward_mean: float
    reward_std: float
    raw_mean: float
    raw_std: float
    oldest_version: int
    newest_version: int
    tokens: int
    closed_ms: int
    task_type: str = ""
    roles: list[RoleStatistics] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One trained member in a lane of a batch topic. Whole groups share a lane, so a rank sees all members of a group.

    ``group_mean``, ``group_std``, ``group_count`` and ``group_roles`` are the shaped reward statistics of its Group
    record.

    Example: Item(policy=0, batch=3, lane=1, index=0, use=0, group=5, replica=0, stream="main",
    prompt_id="7d0c8a3e4f2b1a90",
    raw_reward=1.0, shaped_reward=1.0, group_mean=.5, group_std=.53, group_count=8, length=6, oldest_version=7,
    newest_version=8, end_reason="stop", sequences=[...])
    """

    policy: int
    batch: int
    lane: int
    index: int
    use: int
    group: int
    replica: int
    stream: str
    prompt_id: str
    raw_reward: float
    shaped_reward: float
    group_mean: float
    group_std: float
    group_count: int
    length: int
    oldest_version: int
    newest_version: int
    end_reason: str
    rewards: list[Reward] = field(default_factory=list)
    group_roles: list[RoleStatistics] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    blob: BlobRef | None = None
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A composed batch: what lies in which lane, and the global counts that denominators are made of (protocol 4, 8).

    Staleness of a member is ``start_version - oldest_version``. ``since_version`` is the version of the last Resumed.

    Example: Manifest(policy=0, batch=3, start_version=2, since_version=0, fresh_groups=32, replayed_groups=0,
    tokens=1500,
    sequences=256, trajectories=256, groups=32, composed_ms=95, lanes=[Lane(lane=0, count=32, tokens=190, digest="..")])
    """

    policy: int
    batch: int
    start_version: int
    since_version: int
    fresh_groups: int
    replayed_groups: int
    tokens: int
    sequences: int
    trajectories: int
    groups: int
    composed_ms: int
    lanes: list[Lane] = field(default_factory=list)
    members: list[ManifestMember] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Batch ``batch`` has become version ``version``, whose weights are committed in the object store (protocol 4, 8).

    Example: Step(policy=0, batch=3, version=3, lineage=0, updates=1, loss=-.01, tokens=1500, sequences=256,
    wait_seconds=.2, step_seconds=.15, publish_seconds=.01, delta_bytes=90000, changed_share=.45, finished_ms=99,
    metrics={"reward/mean": .5})
    """

    policy: int
    batch: int
    version: int
    lineage: int
    updates: int
    loss: float
    tokens: int
    sequences: int
    wait_seconds: float
    step_seconds: float
    publish_seconds: float
    delta_bytes: int
    changed_share: float
    finished_ms: int
    metrics: dict[str, float] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A new lineage starts from a checkpoint; from here on resume takes the newest checkpoint of it, else this base.

    ``discard`` is what the Resumed that follows has to say, whichever process comes to write it.

    Example: Rollback(policy=0, lineage=1, base_lineage=0, base_batch=40, base_version=40)
    """

    policy: int
    lineage: int
    base_lineage: int
    base_batch: int
    base_version: int
    discard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The weights of batch ``batch`` are published again as ``version``; the new pairing of batches and versions.

    Example: Resumed(policy=0, lineage=1, batch=40, version=58)
    """

    policy: int
    lineage: int
    batch: int
    version: int
    discard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A pointer to a policy's newest committed version (compacted topic ``deltas``); a hint, the store is the truth.

    ``manifest`` is the manifest's file where it has at most 64 KB, else empty: it saves a reader two round trips.

    Example: Head(policy=0, version=3, batch=3, lineage=0, kind="delta",
    manifest_key="runs/first/main/manifest/000000000003.json",
    manifest_sha256="..", root_digest="..", layout_digest="..", size=90000, published_ms=98)
    """

    policy: int
    version: int
    batch: int
    lineage: int
    kind: str
    manifest_key: str
    manifest_sha256: str
    root_digest: str
    layout_digest: str
    size: int
    published_ms: int
    manifest: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluated sample, with the versions that it was sampled from. ``rewards`` are its parts, by role where a
    workflow has roles.

    Example: EvalResult(policy=0, suite="heldout", prompt_id="7d0c8a3e4f2b1a90", replica=0, version=10,
    oldest_version=10,
    newest_version=11, reward=1.0, tokens=6, end_reason="stop", finished_ms=99)
    """

    policy: int
    suite: str
    prompt_id: str
    replica: int
    version: int
    oldest_version: int
    newest_version: int
    reward: float
    tokens: int
    end_reason: str
    finished_ms: int
    error: str = ""
    prompt_text: str = ""
    completion_text: str = ""
    rewards: list[Reward] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
