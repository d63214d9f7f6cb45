"""The parts that records are made of: sequences of tokens, rewards, positions, sampling parameters.

A part never travels alone; records.py holds what does. Arrays are one-dimensional numpy arrays that travel as packed
little-endian bytes; the field's metadata names the dtype. All parts are frozen and compare by identity of their
arrays, so tests compare them through ``codec.to_plain``.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = (
    "AdmittedPolicy",
    "BlobRef",
    "Extra",
    "HeldTask",
    "HostedPolicy",
    "Lane",
    "ManifestMember",
    "MemberScore",
    "Message",
    "PolicyBound",
    "Reward",
    "RolePart",
    "RoleStatistics",
    "Sampling",
    "Sequence",
    "Source",
    "array",
)


def array(dtype: str) -> Any:
    """A dataclass field for a one-dimensional array of ``dtype`` ('int32', 'float32', 'uint8'), empty by default."""
    return field(default_factory=lambda: np.empty(0, dtype), metadata={"dtype": dtype}, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a record that this one was made from lies: ``topic[partition]@offset`` (topic without the run's prefix)."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Effective sampling parameters; temperature 1, top_p 1 and top_k 0 leave the policy's distribution as it is.

    ``extra`` is a JSON object of whatever else changes it (``min_tokens``, penalties, a JSON schema); empty: nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 16
    seed: int = -1
    extra: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One named part of a trajectory's reward; ``role`` empty and ``turn`` -1 when it is of the whole trajectory.

    ``detail`` is what the reward or environment said of it in words, such as a sandbox's verdict.
    """

    name: str
    value: float
    role: str = ""
    turn: int = -1
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePart:
    """Who played a role of a trajectory: the policy's index, and the count of its trained tokens in that role."""

    role: str
    policy: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStatistics:
    """Shaped rewards of one role over the counted members that were rewarded for it: mean, unbiased deviation."""

    role: str
    mean: float
    std: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberScore:
    """One named part of a group-scope reward, for one replica; with ``error`` the replica could not be scored."""

    replica: int
    name: str
    value: float
    error: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """An optional per-sequence array (values, teacher log-probs): inline ``data`` or a store ``reference``."""

    dtype: str
    shape: list[int]
    data: bytes = b""
    reference: str = ""


class _Wired:
    """What a Sequence knows beside its fields: neither compared, nor copied by ``replace``, nor pickled."""

    __slots__ = ("_sound", "_wire")

    @property
    def wire(self) -> memoryview | None:
        """The Avro bytes that it was decoded from; None for one that was made here, or decoded for good."""
        return getattr(self, "_wire", None)

    def keep_wire(self, wire: memoryview) -> None:
        """Remember the bytes; they keep the whole record's value in memory."""
        object.__setattr__(self, "_wire", wire)

    @property
    def sound(self) -> bool:
        """Whether it has passed ``checks.check_sequence`` since; only for one whose arrays nobody can change."""
        return getattr(self, "_sound", False)

    def note_sound(self) -> None:
        """It has passed the checks."""
        if self.wire is not None:
            object.__setattr__(self, "_sound", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence(_Wired):
    """Tokens of one context of one policy, exactly as sampled; never re-tokenised.

    All four arrays have the length of prompt plus completion: ``tokens`` int32; ``logprobs`` float32, behave
    log-probs in nats, 0 where ``mask`` is 0; ``mask`` uint8, 1 on tokens that the policy sampled and that are
    trained; ``versions`` int32, the policy version that sampled the token, -1 elsewhere. ``oldest_version`` and
    ``newest_version`` are over the tokens with mask 1 (-1 when there is none). ``end_reason`` is one of
    ``records.END_REASONS``.

    Example: Sequence(policy=0, role="policy", prompt_length=2, end_reason="stop", oldest_version=7, newest_version=8,
    sampling=Sampling(), tokens=[9, 4, 6, 2], logprobs=[0, 0, -.2, -.1], mask=[0, 0, 1, 1], versions=[-1, -1, 7, 8])
    """

    policy: int
    role: str
    prompt_length: int
    end_reason: str
    oldest_version: int
    newest_version: int
    trainable: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    tokens: npt.NDArray[np.int32] = array("int32")
    logprobs: npt.NDArray[np.float32] = array("float32")
    mask: npt.NDArray[np.uint8] = array("uint8")
    versions: npt.NDArray[np.int32] = array("int32")
    extras: dict[str, Extra] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """Where the sequences of a large trajectory lie in the object store: key, bytes and xxh3-128 of the object."""

    key: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedPolicy:
    """A policy that a worker serves and the version it has loaded and verified."""

    policy: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTask:
    """A task that a worker holds: its key and the offset of its newest partial in ``partials`` (-1: none)."""

    kind: str
    group: int
    replica: int
    attempt: int
    partial: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBound:
    """The oldest version of a policy that may sample a token of a task; ``pinned`` allows only that version."""

    policy: int
    min_version: int
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedPolicy:
    """A policy for which a group opened a credit: min version and the cap that was in force (groups)."""

    policy: int
    min_version: int
    cap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestMember:
    """One item of a batch: ``use`` counts the batches that used the member before (0: fresh)."""

    group: int
    replica: int
    use: int
    lane: int
    oldest_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one lane of a batch topic holds of a batch: items, trained tokens, digest of the item values in order."""

    lane: int
    count: int
    tokens: int
    digest: str
