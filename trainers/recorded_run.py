"""A recorded run as training from the log sees it: which batches its final lineage trained, and to which weights.

In: the ``steps`` topic, the checkpoints and the store of the run; out: versions by batch, digests, and where one can
begin. Nothing is written.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.connectors.kafka import Connection
from headrace.connectors.stores.chain import Chain
from headrace.connectors.stores.store import ObjectStore, StoreError
from headrace.schemas.delta_layout import DeltaError, Layout
from headrace.schemas.delta_shard import digest_of, root_of
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Record, Resumed, Rollback, Step
from headrace.trainers.backends.backend import Weights
from headrace.trainers.lineage import StepsSeen, seen_in

__all__ = ("Recorded", "folded", "read_recorded", "recorded_digest", "weights_digest")


@dataclass(slots=True)
class Recorded:
    """seen: what ``steps`` says. versions: batch of the final lineage to its version; 0 are the initial weights."""

    seen: StepsSeen
    versions: dict[int, int] = field(default_factory=lambda: {0: 0})

    @property
    def last(self) -> int:
        """The last batch that has a Step in the final lineage."""
        return max(self.versions)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The batches asked for; ``last`` 0 means to the end. Raises ConfigurationError for what was not trained."""
        end = last or self.last
        if not 1 <= first <= end <= self.last:
            raise ConfigurationError(
                f"batches {first} to {end} are not all in the recorded run: it has trained batches 1 to {self.last}"
                if self.last
                else "the recorded run has trained no batch"
            )
        return first, end


def read_recorded(connection: Connection, policy: int) -> Recorded:
    """Read ``steps`` of a policy to its end. Raises what the connection raises."""
    raws = connection.read_topic("steps", {policy: 0})
    return folded(record for raw in raws if (record := raw.decoded_if_ours()) is not None)


def folded(records: Iterable[Record]) -> Recorded:
    """From the records of ``steps`` in their order."""
    records = list(records)
    found = Recorded(seen_in(records))
    for record in records:
        if isinstance(record, Rollback):
            found.versions = {k: v for k, v in found.versions.items() if k <= record.base_batch}
        elif isinstance(record, Step | Resumed):
            found.versions.setdefault(record.batch, record.version)
    return found


def recorded_digest(store: ObjectStore, run: str, policy: str, version: int | None) -> str:
    """The root digest of a published version; empty when the store does not have it any more."""
    if version is None:
        return ""
    try:
        return Chain(store, run, policy).committed(version).root_digest
    except (StoreError, DeltaError):
        return ""


def weights_digest(weights: Weights) -> str:
    """The root digest that a version with these weights would be published with."""
    layout = Layout.of(weights, dict.fromkeys(weights, "bfloat16"))
    image = layout.image()
    layout.fill(image, weights)
    return root_of(digest_of(layout.elements(image, segment)) for segment in layout.segments)
