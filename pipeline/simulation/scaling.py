"""A pool that the product's balance report resizes while a simulated run goes on."""

from headrace.pipeline.balance import Balance, BalanceReport, Zones
from headrace.pipeline.balance_apply import Bounds, Scaler
from headrace.pipeline.run_records import TrajectoryHead
from headrace.pipeline.simulation.plan import Plan
from headrace.pipeline.simulation.world import World
from headrace.schemas.records import Record, Trajectory

__all__ = ("ScaledPool",)


class ScaledPool:
    """A run whose workers join and leave as a Scaler says. ``sizes``: (seconds, size, wanted) of every report."""

    def __init__(
        self, plan: Plan, bounds: Bounds, *, versions: int = 10, zones: Zones | None = None, join_seconds: float = 60.0
    ) -> None:
        self.sizes: list[tuple[float, int, int]] = []
        self.reports: list[BalanceReport] = []
        self._versions = versions
        self._join_seconds = join_seconds
        config = plan.config()
        self._balance = Balance(
            config.policy_names(), versions, zones=zones, silent_seconds=config.rollout.lease_seconds
        )
        self._scaler: Scaler | None = None
        self._reported = 0
        self.world = World(plan, self._stepped)
        self._scaler = Scaler(self._resize, bounds, lambda: self.world.clock.now)
        self._next: dict[tuple[str, int], int] = {}

    def play(self) -> World:
        """Run to the end."""
        return self.world.play()

    def _stepped(self, world: World) -> None:
        self._catch_up()
        if self._balance.steps_seen - self._reported < self._versions * len(world.trainers):
            return
        report = self._balance.report()
        if report is None or self._scaler is None:
            return
        self._reported = self._balance.steps_seen
        self.reports.append(report)
        self._scaler.consider(report)
        self.sizes.append((world.clock.now, report.size, report.target))

    def _catch_up(self) -> None:
        """Fold what the topics have got since the last step."""
        for place, log in self.world.driver.log.items():
            if place[0] in ("steps", "ledger", "demand", "trajectories"):
                for entry in log[self._next.get(place, 0) :]:
                    self._balance.fold(_headed(entry.record), entry.timestamp_ms)
                self._next[place] = len(log)

    def _resize(self, size: int, target: int, branch: str) -> str:
        for _ in range(target - size):
            self.world.clock.after(self._join_seconds, self.world.join)
        for _ in range(size - target):
            self.world.shrink()
        return ""


def _headed(record: Record) -> Record | TrajectoryHead:
    if not isinstance(record, Trajectory):
        return record
    return TrajectoryHead(
        group=record.group, replica=record.replica, attempt=record.attempt, worker=record.worker, status=record.status,
        end_reason=record.end_reason, reward=record.reward, tokens=record.tokens, started_ms=record.started_ms,
        finished_ms=record.finished_ms, error=record.error, prompt_text="", completion_text="",
    )  # fmt: skip
