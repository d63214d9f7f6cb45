"""The topics of a run as a Balance: the last versions first, then what comes.

In: a connection; out: reports, and gauges that Prometheus and autoscalers read. Only the window's part of large topics
is read.
"""

from headrace.connectors.kafka import Connection
from headrace.pipeline.balance import Balance, BalanceReport, Zones
from headrace.pipeline.run_records import created_run, head_of
from headrace.pipeline.runtime.stage import Metrics
from headrace.schemas.records import RunEnd, Step

__all__ = ("BalanceFeed", "show_metrics")

_WINDOW_TOPICS = ("ledger", "demand", "trajectories")


class BalanceFeed:
    """Folds a run's topics into ``balance``; ``catch_up`` reads to their present ends."""

    def __init__(self, connection: Connection, versions: int, zones: Zones | None = None) -> None:
        """Raises HeadraceError for a run without a manifest, MissingTopic for none at all."""
        manifest, _ = created_run(connection)
        self.balance = Balance(manifest.policies, versions, zones=zones)
        self.ended = False
        """The run's end mark has been read."""
        self._connection = connection
        self._versions = versions
        self._next: dict[str, dict[int, int]] = {}

    def catch_up(self) -> None:
        """Read what has been committed since the last call. Raises MissingTopic, BrokerUnreachable."""
        steps = self._read("steps")
        if not self._next.keys() >= set(_WINDOW_TOPICS):
            since = _window_start(steps, self._versions)
            for topic in _WINDOW_TOPICS:
                self._next[topic] = self._connection.offsets_since(topic, since)
        for topic in (*_WINDOW_TOPICS, "run"):
            self._read(topic)

    def _read(self, topic: str) -> list[Step]:
        """Fold a topic to its end; gives the steps among it."""
        at = self._next.setdefault(topic, self._connection.start_offsets(topic))
        steps = []
        for raw in self._connection.read_topic(topic, at):
            at[raw.partition] = raw.offset + 1
            record = head_of(raw) if topic == "trajectories" else raw.decoded_if_ours()
            if record is None:
                continue
            self.ended = self.ended or isinstance(record, RunEnd)
            self.balance.fold(record, raw.timestamp_ms)
            if isinstance(record, Step):
                steps.append(record)
        return steps


def _window_start(steps: list[Step], versions: int) -> int:
    """When the window of the policy that is furthest back begins; 0 before there is one."""
    by_policy: dict[int, list[int]] = {}
    for step in steps:
        by_policy.setdefault(step.policy, []).append(step.finished_ms)
    return min((times[-versions - 1 :][0] for times in by_policy.values()), default=0)


def show_metrics(report: BalanceReport, metrics: Metrics) -> None:
    """Put a report into gauges; Prometheus shows them with the prefix ``headrace_``."""
    metrics.gauge("balance_workers", report.size)
    metrics.gauge("balance_target_workers", report.target)
    metrics.gauge("balance_wait_share", report.wait_share)
    metrics.gauge("balance_busy_share", report.busy_share)
    for policy in report.policies:
        metrics.gauge("balance_policy_wait_share", policy.wait_share, policy=policy.policy)
        metrics.gauge("balance_policy_step_seconds", policy.step_seconds, policy=policy.policy)
    for worker in report.workers:
        metrics.gauge("balance_worker_busy_share", worker.busy, worker=worker.worker)
        metrics.gauge("balance_worker_tokens_per_second", worker.tokens_per_second, worker=worker.worker)
