"""The manifest of a weight version: the one object whose creation commits the version, and the keys of all objects.

Goes in: what a publisher uploaded; comes out: canonical JSON that carries its own sha256, names its parent by version
and sha256, and holds the digests of everything else. Whoever holds the sha256 of a manifest holds the whole chain.

The file is ``{"body": {...}, "sha256": "<hex>"}``; the sha256 is of the body as JSON with sorted keys and no spaces.
"""

import hashlib
import json
import re
from dataclasses import astuple, dataclass
from typing import Any, Self

from headrace.schemas.delta_codec import CODEC
from headrace.schemas.delta_layout import DeltaCorrupt

__all__ = (
    "CommittedVersion",
    "DeltaKeys",
    "ShardRef",
    "WeightManifest",
    "check_manifest",
    "check_refs",
    "is_time",
    "read_refs",
    "seal",
    "unseal",
)

_FORMAT = "headrace-manifest/1"
_LARGEST = 64 << 20
_LARGEST_OBJECT = 1 << 50
_LARGEST_HEAD = 1 << 30
_LARGEST_NUMBER = 1 << 63
_YEAR_10000_MS = 253_402_300_800_000
_DIGEST = re.compile(r"[0-9a-f]{32}")
_PARENT = re.compile(r"([0-9a-f]{64})?")
_PART = r"[A-Za-z0-9_=+@~-][A-Za-z0-9._=+@~-]{0,199}"
_KEY = re.compile(rf"(?=.{{1,900}}\Z){_PART}(?:/{_PART})*")


@dataclass(frozen=True, slots=True)
class DeltaKeys:
    """The object keys of one policy of a run (``runs/{run}/{policy}/...``)."""

    run: str
    policy: str

    @property
    def root(self) -> str:
        """``runs/{run}/{policy}``."""
        return f"runs/{self.run}/{self.policy}"

    @property
    def manifests(self) -> str:
        """The prefix of all manifests."""
        return f"{self.root}/manifest/"

    @property
    def latest(self) -> str:
        """The hint object: the number of a committed version, mostly not the newest."""
        return f"{self.root}/LATEST"

    def layout(self, digest: str) -> str:
        """The layout table with this digest."""
        return f"{self.root}/layout/{digest}"

    def manifest(self, version: int) -> str:
        """The manifest of a version: twelve digits, so that keys sort like versions."""
        return f"{self.manifests}{version:012d}.json"

    def shard(self, kind: str, version: int, attempt: str, rank: int, part: int = 0) -> str:
        """An object of one rank; the attempt makes the key unique, so it is never written twice. kind: full, delta."""
        return f"{self.root}/{kind}/{version}/{attempt}/r{rank}{f'-{part}' if part else ''}.bin"

    @property
    def merges(self) -> str:
        """The prefix of all merged deltas."""
        return f"{self.root}/merged/"

    @property
    def pruned(self) -> str:
        """The object that names the oldest version whose objects are kept (decimal)."""
        return f"{self.root}/PRUNED"

    def merged(self, version: int, first: int) -> str:
        """The manifest of the merged delta from ``first`` to ``version``; keys sort by version."""
        return f"{self.merges}{version:012d}-{first:012d}.json"

    def merged_shard(self, version: int, first: int, attempt: str, rank: int, part: int) -> str:
        """An object of a merged delta."""
        return f"{self.merges}{version:012d}-{first:012d}/{attempt}/r{rank}-{part}.bin"

    def merge_of(self, key: str) -> tuple[int, int] | None:
        """Version and first version of a merged delta's manifest; None for other keys."""
        version, _, first = key.removeprefix(self.merges).removesuffix(".json").partition("-")
        if not (version.isdecimal() and first.isdecimal()) or self.merged(int(version), int(first)) != key:
            return None
        return int(version), int(first)

    def version_of(self, key: str) -> int | None:
        """The version of a manifest's key; None for other keys."""
        stem = key.removeprefix(self.manifests).removesuffix(".json")
        return int(stem) if len(stem) == 12 and stem.isdecimal() and self.manifest(int(stem)) == key else None


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One uploaded object: key, size, length of its head (both bytes) and xxh3-128 of the head as 32 hex digits."""

    key: str
    nbytes: int
    head: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedVersion:
    """A version as the store holds it; what trainer, head record and resume pass around.

    kind: ``full`` or ``delta`` (a delta version may have a full beside it). size: bytes of all its objects.
    changed_share: changed elements / all elements against the parent (1.0 without one).
    """

    run: str
    policy: str
    version: int
    lineage: int
    batch: int
    parent: int
    manifest_key: str
    manifest_sha256: str
    root_digest: str
    layout_digest: str
    kind: str
    size: int
    published_ms: int
    attempt: str
    changed_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """The body of a manifest.

    version, parent: parent is -1 for the first version, with an empty ``parent_sha256``. newest_full: the newest
    version <= this one that has a full. delta, full: the objects that lead here from the parent, and from nothing; at
    least one of the two. changed: changed elements of every tensor against the parent, in the order of the layout.
    elements: elements of all tensors. attempt: names the writer and its try.
    """

    version: int
    lineage: int
    batch: int
    parent: int
    parent_sha256: str
    root_digest: str
    layout_digest: str
    newest_full: int
    delta: tuple[ShardRef, ...]
    full: tuple[ShardRef, ...]
    changed: tuple[int, ...]
    elements: int
    attempt: str
    published_ms: int
    codec: str = CODEC

    def to_bytes(self) -> tuple[bytes, str]:
        """The file's bytes and the sha256 of the body (hex)."""
        body = {name: getattr(self, name) for name in self.__slots__}
        body["format"] = _FORMAT
        body["delta"], body["full"] = ([astuple(ref) for ref in refs] for refs in (self.delta, self.full))
        return seal(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[Self, str]:
        """Read a manifest and its sha256. Raises DeltaCorrupt unless the sha256 is right and every field is sound."""
        body, sha256 = unseal(data, _FORMAT)
        try:
            body["delta"], body["full"] = read_refs(body["delta"]), read_refs(body["full"])
            body["changed"] = tuple(body["changed"])
            manifest = cls(**body)
            check_manifest(manifest)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeltaCorrupt(f"manifest cannot be read: {error}") from error
        return manifest, sha256

    def committed(self, keys: DeltaKeys, sha256: str) -> CommittedVersion:
        """This manifest as a committed version."""
        total = sum(self.changed)
        return CommittedVersion(
            run=keys.run,
            policy=keys.policy,
            version=self.version,
            lineage=self.lineage,
            batch=self.batch,
            parent=self.parent,
            manifest_key=keys.manifest(self.version),
            manifest_sha256=sha256,
            root_digest=self.root_digest,
            layout_digest=self.layout_digest,
            kind="delta" if self.delta else "full",
            size=sum(ref.nbytes for ref in (*self.delta, *self.full)),
            published_ms=self.published_ms,
            attempt=self.attempt,
            changed_share=total / self.elements if self.elements else 0.0,
        )


def seal(body: dict[str, Any]) -> tuple[bytes, str]:
    """A file that carries its own sha256: ``{"body": ..., "sha256": hex}``; its bytes and that sha256."""
    text = _canonical(body)
    sha256 = hashlib.sha256(text).hexdigest()
    return b'{"body":' + text + b',"sha256":"' + sha256.encode() + b'"}\n', sha256


def unseal(data: bytes, form: str) -> tuple[dict[str, Any], str]:
    """The body of a sealed file without its format and its sha256. Raises DeltaCorrupt when it is not whole."""
    if len(data) > _LARGEST:
        raise DeltaCorrupt(f"manifest of {len(data)} bytes: the limit is {_LARGEST}")
    try:
        file = json.loads(data)
        body, sha256 = file["body"], file["sha256"]
        if hashlib.sha256(_canonical(body)).hexdigest() != sha256:
            raise DeltaCorrupt("manifest does not have the sha256 that it says")
        if body.pop("format") != form or body["codec"] != CODEC:
            raise DeltaCorrupt(f"manifest is not of {form} with {CODEC}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DeltaCorrupt(f"manifest cannot be read: {error}") from error
    return body, str(sha256)


def read_refs(rows: Any) -> tuple[ShardRef, ...]:
    """The rows of objects in a manifest. Raises TypeError when they are not rows; ``check_refs`` checks them."""
    return tuple(ShardRef(*row) for row in rows)


def check_refs(refs: tuple[ShardRef, ...]) -> None:
    """Raise ValueError when a row cannot be true."""
    for ref in refs:
        whole = type(ref.nbytes) is int and type(ref.head) is int
        if not whole or not 64 <= ref.head <= min(ref.nbytes, _LARGEST_HEAD) or ref.nbytes > _LARGEST_OBJECT:
            raise ValueError("an object's row is not sound")
        if not _KEY.fullmatch(ref.key) or not _DIGEST.fullmatch(ref.digest):
            raise ValueError("an object's row is not sound")


def is_time(milliseconds: object) -> bool:
    """Whether a number from a file can be the time of something that was published: since the epoch, before 10000."""
    return type(milliseconds) is int and 0 <= milliseconds < _YEAR_10000_MS


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def check_manifest(manifest: WeightManifest) -> None:
    """Raise ValueError when a field cannot be true; types included, JSON has its own ideas of numbers."""
    numbers = ("version", "lineage", "batch", "parent", "newest_full", "elements", "published_ms")
    if not all(type(getattr(manifest, name)) is int for name in numbers):
        raise ValueError("a number is not an integer")
    if not all(abs(getattr(manifest, name)) < _LARGEST_NUMBER for name in numbers) or not is_time(
        manifest.published_ms
    ):
        raise ValueError("a number is beyond what can be")
    refs = (*manifest.delta, *manifest.full)
    sound = (
        -1 <= manifest.parent < manifest.version < 10**12
        and 0 <= manifest.newest_full <= manifest.version
        and bool(refs)
        and (manifest.parent >= 0 or not manifest.delta)
        and (manifest.newest_full == manifest.version) == bool(manifest.full)
        and all(type(n) is int and n >= 0 for n in manifest.changed)
        and sum(manifest.changed) <= manifest.elements
        and all(_DIGEST.fullmatch(text) for text in (manifest.root_digest, manifest.layout_digest))
        and isinstance(manifest.attempt, str)
        and _PARENT.fullmatch(manifest.parent_sha256) is not None
        and (manifest.parent_sha256 != "") == (manifest.parent >= 0)
    )
    if not sound:
        raise ValueError("its fields contradict each other")
    check_refs(refs)
