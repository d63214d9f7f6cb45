"""The manifest of a merged delta: one way from a version to a later one that skips those between.

Goes in: what a compactor uploaded; comes out: canonical JSON under its own sha256 that names both ends by version and
sha256 of their manifests. It commits nothing: versions exist by their own manifests, and a reader that takes the
merged way must come out at the root digest of the version's manifest.
"""

from dataclasses import astuple, dataclass
from typing import Self

from headrace.schemas.delta_codec import CODEC
from headrace.schemas.delta_layout import DeltaCorrupt
from headrace.schemas.delta_manifest import ShardRef, check_refs, is_time, read_refs, seal, unseal

__all__ = ("MergedDelta",)

_FORMAT = "headrace-merged/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedDelta:
    """The change from version ``first`` to ``version``, with the sha256 of their manifests, in one set of objects."""

    first: int
    first_sha256: str
    version: int
    version_sha256: str
    refs: tuple[ShardRef, ...]
    published_ms: int
    codec: str = CODEC

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        body = {name: getattr(self, name) for name in self.__slots__}
        body["refs"] = [astuple(ref) for ref in self.refs]
        return seal(body | {"format": _FORMAT})[0]

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a file back. Raises DeltaCorrupt unless its sha256 is right and every field is sound."""
        body, _ = unseal(data, _FORMAT)
        try:
            body["refs"] = read_refs(body["refs"])
            merged = cls(**body)
            numbers = (merged.first, merged.version)
            hashes = (merged.first_sha256, merged.version_sha256)
            whole = (
                all(type(number) is int for number in numbers)
                and is_time(merged.published_ms)
                and all(len(text) == 64 for text in hashes)
            )
            if not whole or not 0 <= merged.first < merged.version < 10**12 or not merged.refs:
                raise ValueError("its fields contradict each other")
            check_refs(merged.refs)
        except (ValueError, KeyError, TypeError) as error:
            raise DeltaCorrupt(f"merged delta cannot be read: {error}") from error
        return merged
