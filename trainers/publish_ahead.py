"""Publishing beside the next step: the trainer pays for one copy of the weights, the rest happens in a thread.

Goes in: weights after a step; comes out, later, the committed version. At most one publish is under way; whoever needs
its outcome (to write the Step, to publish the next version) waits for it, and an error comes up there.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray

from headrace.schemas.delta_manifest import CommittedVersion
from headrace.trainers.step_to_delta import DeltaPublisher, Kind

__all__ = ("PublishAhead",)


class PublishAhead:
    """A ``DeltaPublisher`` whose publishes run beside the caller.

    critical_seconds: time that callers spent here so far: copying weights, and waiting for a publish to end.
    total_seconds: time that publishes took, in the thread too.
    """

    def __init__(self, publisher: DeltaPublisher) -> None:
        self._publisher = publisher
        self._pool = ThreadPoolExecutor(1, "publish")
        self._running: Future[CommittedVersion] | None = None
        self.critical_seconds = 0.0
        self.total_seconds = 0.0

    def start(
        self,
        weights: Mapping[str, NDArray[Any]],
        *,
        version: int,
        lineage: int,
        batch: int,
        parent: CommittedVersion | None,
        kind: Kind = None,
    ) -> None:
        """Copy the weights and publish them beside the caller (see ``DeltaPublisher.publish``).

        The weights may change as soon as this returns. Raises ValueError while another publish is under way: ``wait``.
        """
        if self._running is not None:
            raise ValueError(f"version {version} must wait for the publish before it: call wait")
        began = time.monotonic()
        self._publisher.stage(weights, version, parent)
        self.critical_seconds += time.monotonic() - began

        def publish() -> CommittedVersion:
            try:
                return self._publisher.publish_staged(
                    version=version, lineage=lineage, batch=batch, parent=parent, kind=kind
                )
            finally:
                self.total_seconds += time.monotonic() - began

        self._running = self._pool.submit(publish)

    def wait(self) -> CommittedVersion | None:
        """The version that was under way, once it is committed; None when none was. Raises what the publish raised."""
        running, self._running = self._running, None
        if running is None:
            return None
        began = time.monotonic()
        try:
            return running.result()
        finally:
            self.critical_seconds += time.monotonic() - began
