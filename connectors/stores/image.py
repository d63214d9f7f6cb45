"""Rebuilds the weights of a version from the store, verified to the last bit before anybody sees them.

Goes in: a chain, a version and perhaps the image that is loaded; comes out: a new image whose root digest is the
manifest's. Every manifest, head and table of the plan is checked before the first element changes, every payload
before it is applied, every segment after it; the image that came in is never touched, so a crash leaves it whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.connectors.stores.chain import Chain, Hop, Link, MissingLink
from headrace.connectors.stores.store import NoSuchKey
from headrace.schemas.delta_codec import apply_frame
from headrace.schemas.delta_layout import DeltaCorrupt, Layout
from headrace.schemas.delta_manifest import ShardRef
from headrace.schemas.delta_shard import (
    FULL,
    FrameRow,
    SegmentRow,
    ShardHead,
    apply_frames,
    digest_of,
    root_of,
    unpack_head,
)
from headrace.schemas.delta_steps import Kernels, kernels_for

__all__ = ("Image", "apply_hop", "check_hop", "load_image", "load_share")

T = TypeVar("T")
_Frame = tuple[int, int, memoryview]
"""First element, elements, verified payload."""

_WHOLE = 256 << 20
_CHUNK = 8 << 20
_WINDOW = 16 << 20
_TRIES = 3
_PARALLEL_ABOVE = 1 << 20


@dataclass(frozen=True, slots=True)
class Image:
    """The verified weights of a version: its link, layout, all bytes (uint8 [nbytes], read-only) and segment digests.

    bytes_read, requests, hops: what loading it took.
    """

    link: Link
    layout: Layout
    data: NDArray[np.uint8]
    digests: tuple[bytes, ...]
    bytes_read: int
    hops: int
    requests: int = 1

    @property
    def version(self) -> int:
        """The version."""
        return self.link.version

    @property
    def root_digest(self) -> str:
        """The digest of the image."""
        return self.link.manifest.root_digest


class _HopFailed(Exception):
    """A hop of the plan is unusable, or (``on_base``) the result on the given base was wrong."""

    def __init__(self, hop: Hop, *, on_base: bool = False) -> None:
        super().__init__(str(hop))
        self.hop = hop
        self.on_base = on_base


@dataclass(frozen=True, slots=True)
class _Shard:
    hop: int
    ref: ShardRef
    head: ShardHead
    body: bytes | bytearray | None


def load_image(chain: Chain, version: int, base: Image | None = None, without: Iterable[str] = ()) -> Image:
    """The weights of a version: by deltas on ``base`` or from a full, whichever is cheaper.

    An object that is missing or stays damaged is left out and the way planned again; a result that is wrong on
    ``base`` is built again from a full. without: texts of hops not to use. Raises MissingLink when no way is left,
    NoSuchKey when the version is not committed, and the store's errors (then repeat the call).
    """

    def build(plan: list[Hop], base: Image | None) -> Image:
        return base if base is not None and not plan else _Loading(chain, plan, base).image()

    return _by_any_way(chain, version, build, base, without)


def load_share(chain: Chain, version: int, segments: range) -> tuple[NDArray[np.uint8], tuple[bytes, ...]]:
    """The bytes of a run of segments of a version, read-only, and their digests; nothing else is fetched or held.

    Heads of all objects are read, so the digests are those of the manifest's root. Raises as ``load_image`` does.
    """
    return _by_any_way(chain, version, lambda plan, _: _Loading(chain, plan, None, segments).share())


def _by_any_way(
    chain: Chain,
    version: int,
    build: Callable[[list[Hop], Image | None], T],
    base: Image | None = None,
    without: Iterable[str] = (),
) -> T:
    """What ``build`` makes of the cheapest plan that works."""
    unusable = set(without)
    trouble: BaseException | None = None
    while True:
        known = (base.version, base.link.sha256) if base is not None else None
        try:
            plan = chain.plan(version, known, unusable)
        except MissingLink as error:
            raise error from trouble
        try:
            return build(plan, base)
        except _HopFailed as failed:
            trouble = failed.__cause__ or failed
            if failed.on_base:
                base = None
            else:
                unusable.add(str(failed.hop))


def apply_hop(chain: Chain, hop: Hop, base: Image | None) -> Image:
    """The image after one hop from ``base`` (its parent's image; None for a full), verified like every other.

    Raises DeltaCorrupt or NoSuchKey when the hop cannot be used, and the store's errors.
    """
    try:
        return _Loading(chain, [hop], base).image()
    except _HopFailed as failed:
        raise failed.__cause__ or failed from None


def check_hop(chain: Chain, hop: Hop) -> None:
    """Read every byte of a hop and compare it with its digests, without the weights that it builds on.

    What the digest of the new weights alone can tell is not seen. Raises as ``apply_hop`` does.
    """
    try:
        _Loading(chain, [hop], None).check()
    except _HopFailed as failed:
        raise failed.__cause__ or failed from None


class _Loading:
    """One try of one plan, for all segments or a run of them."""

    def __init__(self, chain: Chain, plan: Sequence[Hop], base: Image | None, segments: range | None = None) -> None:
        self._store = chain.store
        self._map = chain.pool.map if sum(hop.cost for hop in plan) > _PARALLEL_ABOVE else map
        self._plan = plan
        self._base = None if plan[0].parent < 0 else base
        self._layout = chain.layout(plan[-1].link.manifest.layout_digest)
        self._kernels: Kernels = kernels_for(self._layout.nbytes)
        self._bytes_read = 0
        self._partial = segments is not None
        self._mine = range(len(self._layout.segments)) if segments is None else segments
        self._begin = self._layout.segments[self._mine[0]].offset if self._mine else 0

    def image(self) -> Image:
        """Open and check the whole plan, then build the image."""
        data, digests = self._built()
        link, requests = self._plan[-1].link, max(1, -(-self._bytes_read // _CHUNK))
        return Image(link, self._layout, data, tuple(digests), self._bytes_read, len(self._plan), requests)

    def share(self) -> tuple[NDArray[np.uint8], tuple[bytes, ...]]:
        """The same for the run of segments alone: its bytes and digests."""
        data, digests = self._built()
        return data, tuple(digests[number] for number in self._mine)

    def check(self) -> None:
        """Open the plan's objects and verify every payload."""
        for shard in self._shards():
            for _, rows in self._jobs(shard):
                try:
                    for _, frames in self._frames(shard, rows):
                        for _ in frames:
                            pass
                except (NoSuchKey, DeltaCorrupt) as error:
                    raise _HopFailed(self._plan[shard.hop]) from error

    def _built(self) -> tuple[NDArray[np.uint8], list[bytes]]:
        """The bytes of the segments, and the digests of all segments of the model."""
        shards = self._shards()
        digests, last = self._checked(shards)
        nbytes = sum(self._layout.segments[number].nbytes for number in self._mine)
        data = np.empty(nbytes, np.uint8) if self._base is None else self._base.data.copy()
        for number in range(len(self._plan)):
            jobs = [job for shard in shards if shard.hop == number for job in self._jobs(shard)]
            run = partial(self._apply, data, digests, last)
            for nbytes in self._map(run, *zip(*jobs, strict=True)) if jobs else ():
                self._bytes_read += nbytes
        list(self._map(partial(self._unchanged, data, digests), set(self._mine) - set(last)))
        data.flags.writeable = False
        return data, digests

    def _shards(self) -> list[_Shard]:
        """Every object of the plan with its head checked; deltas whole, all their bytes asked for at once."""
        refs = [(number, ref) for number, hop in enumerate(self._plan) for ref in hop.refs]
        asked = [
            (place, start, min(start + _CHUNK, size))
            for place, (number, ref) in enumerate(refs)
            for size in [ref.nbytes if self._whole(number, ref) else ref.head]
            for start in range(0, size, _CHUNK)
        ]
        parts: dict[int, list[bytes]] = {}
        got = self._map(lambda one: self._part(refs[one[0]], one[1], one[2]), asked)
        for (place, start, end), data in zip(asked, got, strict=True):
            self._bytes_read += len(data)
            # A short answer shifts what follows; the digests find it, and what is wrong is asked for again.
            parts.setdefault(place, []).append(data[: end - start])
        return [
            self._opened(number, ref, parts[place][0] if len(parts[place]) == 1 else b"".join(parts[place]))
            for place, (number, ref) in enumerate(refs)
        ]

    def _whole(self, number: int, ref: ShardRef) -> bool:
        """Whether an object is fetched in one go: small ones, and deltas unless they are as large as fulls."""
        delta = self._plan[number].parent >= 0 and not self._partial
        return ref.nbytes <= (_WHOLE if delta else min(_WHOLE, _CHUNK))

    def _part(self, ref: tuple[int, ShardRef], start: int, end: int) -> bytes:
        try:
            return self._store.get(ref[1].key, start, end)
        except NoSuchKey as error:
            raise _HopFailed(self._plan[ref[0]]) from error

    def _opened(self, number: int, ref: ShardRef, data: bytes) -> _Shard:
        """An object from its first bytes (or all of them), its head checked against the manifest."""
        hop = self._plan[number]
        try:
            for attempt in range(_TRIES):
                if attempt:
                    again = self._store.get(ref.key, 0, min(len(data), max(_CHUNK, ref.head)))
                    data = again + data[len(again) :]
                if len(data) >= ref.head and digest_of(memoryview(data)[: ref.head]).hex() == ref.digest:
                    break
            else:
                raise DeltaCorrupt(f"{self._store.url}: head of {ref.key} does not have digest {ref.digest}")
            head = unpack_head(memoryview(data)[: ref.head], self._layout)
            manifest = hop.link.manifest
            if (head.kind == FULL, head.version, head.parent) != (hop.parent < 0, manifest.version, hop.parent):
                raise DeltaCorrupt(f"{self._store.url}: {ref.key} is not the {hop}")
            if head.nbytes != ref.nbytes:
                raise DeltaCorrupt(f"{self._store.url}: {ref.key} is not the object that its manifest names")
        except (NoSuchKey, DeltaCorrupt) as error:
            raise _HopFailed(hop) from error
        return _Shard(number, ref, head, data if self._whole(number, ref) else None)

    def _checked(self, shards: Sequence[_Shard]) -> tuple[list[bytes], dict[int, int]]:
        """The digests of all segments after the plan, and the last hop that touches each segment.

        Every version on the way must come out at the root digest of its manifest.
        """
        if self._base is not None and self._base.layout.digest != self._layout.digest:
            problem = DeltaCorrupt(f"{self._store.url}: the {self._plan[0]} has another layout than its base")
            raise _HopFailed(self._plan[0], on_base=True) from problem
        digests = list(self._base.digests) if self._base is not None else [b""] * len(self._layout.segments)
        last: dict[int, int] = {}
        for number, hop in enumerate(self._plan):
            mine = [shard for shard in shards if shard.hop == number]
            rows = [row for shard in mine for row in shard.head.segments]
            indices = {row.index for row in rows}
            for row in rows:
                digests[row.index] = row.digest
                last[row.index] = number
            twice = len(indices) != len(rows)
            missing = hop.parent < 0 and len(indices) != len(self._layout.segments)
            if twice or missing or root_of(digests) != hop.link.manifest.root_digest:
                problem = DeltaCorrupt(f"{self._store.url}: the {hop} does not lead to its root digest")
                raise _HopFailed(hop, on_base=number == 0 and self._base is not None) from problem
        return digests, last

    def _jobs(self, shard: _Shard) -> Iterator[tuple[_Shard, list[SegmentRow]]]:
        """The segments of an object in runs of about 16 MB of payload, each fetched by one request."""
        run: list[SegmentRow] = []
        nbytes = 0
        for row in shard.head.segments:
            if row.index not in self._mine:
                continue
            run.append(row)
            nbytes += sum(frame.length for frame in row.frames)
            if nbytes >= _WINDOW:
                yield shard, run
                run, nbytes = [], 0
        if run:
            yield shard, run

    def _apply(
        self,
        data: NDArray[np.uint8],
        digests: Sequence[bytes],
        last: dict[int, int],
        shard: _Shard,
        rows: list[SegmentRow],
    ) -> int:
        """Verify and apply a run of segments; the bytes that were fetched for it."""
        hop = self._plan[shard.hop]
        try:
            for row, frames in self._frames(shard, rows):
                elements = self._elements(data, row.index)
                if last[row.index] != shard.hop:
                    for first, count, payload in frames:
                        apply_frame(payload, elements[first : first + count], self._kernels)
                elif apply_frames(frames, elements, self._kernels) != digests[row.index]:
                    self._wrong(row.index, hop)
        except (NoSuchKey, DeltaCorrupt) as error:
            raise _HopFailed(hop) from error
        return 0 if shard.body is not None else sum(frame.length for row in rows for frame in row.frames)

    def _frames(self, shard: _Shard, rows: list[SegmentRow]) -> Iterator[tuple[SegmentRow, Iterator[_Frame]]]:
        """The segments of a run, fetched by one request, each with its frames."""
        start, end = rows[0].frames[0].offset, rows[-1].frames[-1].offset + rows[-1].frames[-1].length
        if shard.body is None:
            body, origin = memoryview(self._store.get(shard.ref.key, start, end)), start
        else:
            body, origin = memoryview(shard.body), 0
        for row in rows:
            yield row, self._verified(shard.ref.key, row, body, origin)

    def _verified(self, key: str, row: SegmentRow, body: memoryview, origin: int) -> Iterator[_Frame]:
        """The frames of a segment from an object's bytes from ``origin`` on."""
        for frame in row.frames:
            found = body[frame.offset - origin :][: frame.length]
            yield frame.start, frame.count, self._payload(key, frame, found)

    def _unchanged(self, data: NDArray[np.uint8], digests: Sequence[bytes], index: int) -> None:
        """Verify a segment that came from the base and that no hop touched."""
        if digest_of(self._elements(data, index)) != digests[index]:
            self._wrong(index, self._plan[-1])

    def _wrong(self, index: int, hop: Hop) -> NoReturn:
        problem = DeltaCorrupt(f"{self._store.url}: segment {index} is wrong after the {hop}")
        raise _HopFailed(hop, on_base=self._base is not None) from problem

    def _elements(self, data: NDArray[np.uint8], index: int) -> NDArray[Any]:
        segment = self._layout.segments[index]
        start = segment.offset - self._begin
        return data[start : start + segment.nbytes].view(f"<u{segment.width}")

    def _payload(self, key: str, frame: FrameRow, payload: memoryview) -> memoryview:
        """The payload, fetched again by its range when its digest is wrong."""
        for attempt in range(_TRIES):
            if attempt:
                payload = memoryview(self._store.get(key, frame.offset, frame.offset + frame.length))
            if len(payload) == frame.length and digest_of(payload) == frame.digest:
                return payload
        raise DeltaCorrupt(
            f"{self._store.url}: bytes {frame.offset} to {frame.offset + frame.length} of {key} are damaged"
        )
