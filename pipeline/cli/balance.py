"""``headrace balance``: how long trainers wait, what workers make, how many there should be; and makes it so.

In: a run's topics; out: a report once or every so many versions, gauges for an autoscaler, calls of a user's command.
"""

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.pipeline.cli.reading import ClusterOption, FolderOption, RunOption, reading
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.pipeline.balance import BalanceReport
    from headrace.pipeline.balance_apply import Scaler
    from headrace.pipeline.balance_feed import BalanceFeed

__all__ = ("app",)

app = command_group("Balance of rollouts and training.")
_POLL_SECONDS = 2.0


@app.command()
def balance(
    folder: FolderOption = "",
    run: RunOption = "",
    bootstrap: ClusterOption = "",
    versions: Annotated[int, typer.Option("--versions", "-n", min=1, help="Versions that a report is over.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", help="Report again every so many versions, to the end.")] = False,
    apply: Annotated[
        str, typer.Option("--apply", metavar="COMMAND", help="Run this when the pool should grow or shrink; {target}, "
                          "{size}, {delta} and {branch} in it are replaced. Follows the run.")
    ] = "",
    grow_above: Annotated[float, typer.Option("--grow-above", help="Wait share above which the pool grows.")] = 0.10,
    shrink_below: Annotated[float, typer.Option("--shrink-below", help="Wait share below which it may shrink.")] = 0.05,
    margin: Annotated[float, typer.Option("--margin", min=1.0, help="What it keeps beyond what was consumed.")] = 1.10,
    busy_above: Annotated[
        float, typer.Option("--busy-above", min=0.0, help="Share of busy slots above which it grows early; 1: never.")
    ] = 1.0,
    least: Annotated[int, typer.Option("--min", min=0, help="Fewest workers that --apply asks for.")] = 1,
    most: Annotated[int, typer.Option("--max", min=0, help="Most workers that --apply asks for; 0: no bound.")] = 0,
    step: Annotated[int, typer.Option("--step", min=0, help="Largest change at once; 0: any.")] = 0,
    cool_down: Annotated[
        float, typer.Option("--cool-down", min=0.0, help="Seconds after a call of --apply before the next.")
    ] = 300.0,
    output: Output = Format.text,
) -> None:  # fmt: skip
    """Report on the balance of a run. HEADRACE_METRICS_PORT shows the figures to Prometheus while it follows."""
    from headrace.pipeline.balance import Zones
    from headrace.pipeline.balance_apply import Bounds, Command, Scaler

    if not 0 <= shrink_below <= grow_above < 1:
        raise ConfigurationError(f"--shrink-below {shrink_below} and --grow-above {grow_above} must be in this order")
    scaler = None
    if apply:
        bounds = Bounds(least=least, most=most, step=step, cool_down_seconds=cool_down)
        scaler = Scaler(Command(apply), bounds)
    with reading(folder, run, bootstrap) as connection:
        from headrace.pipeline.balance_feed import BalanceFeed

        zones = Zones(grow_above=grow_above, shrink_below=shrink_below, margin=margin, busy_above=busy_above)
        feed = BalanceFeed(connection, versions, zones)
        feed.catch_up()
        if follow or scaler is not None:
            _follow(feed, versions, scaler, output)
            return
        report = feed.balance.report()
    if report is None:
        raise ConfigurationError("no policy has two steps yet: there is nothing to report on")
    _show(report, output, "")


def _follow(feed: "BalanceFeed", versions: int, scaler: "Scaler | None", output: Format) -> None:
    """A report every ``versions`` steps of all policies together, to the end of the run."""
    from headrace.pipeline.balance_feed import show_metrics
    from headrace.pipeline.runtime.metrics import Registry, serve_if_asked

    metrics = Registry()
    serve_if_asked(metrics)
    reported = 0
    while True:
        report = feed.balance.report()
        if report is not None:
            show_metrics(report, metrics)
            if feed.balance.steps_seen - reported >= versions * len(report.policies):
                reported = feed.balance.steps_seen
                _show(report, output, scaler.consider(report) if scaler is not None else "")
        if feed.ended:
            return
        if scaler is not None and (done := scaler.keep(size := feed.balance.living(time.time_ns() // 1_000_000))):
            _show_kept(size, output, done)
        time.sleep(_POLL_SECONDS)
        feed.catch_up()


def _show_kept(size: int, output: Format, done: str) -> None:
    if output is Format.json:
        print_json({"size": size, "done": done})
    else:
        sys.stdout.write(f"{size} workers are left\napply: {done}\n")
    sys.stdout.flush()


def _show(report: "BalanceReport", output: Format, done: str) -> None:
    if output is Format.json:
        print_json({**asdict(report), "seconds": report.seconds, "done": done})
        sys.stdout.flush()
        return
    said = f"{report.seconds:.0f} s, trainer waits {report.wait_share:.1%}, slots busy {report.busy_share:.1%}"
    sys.stdout.write(f"{said}\n{report.branch}: {report.size} workers, should be {report.target}\n")
    if done:
        sys.stdout.write(f"apply: {done}\n")
    sys.stdout.write("\n")
    rows = [
        (p.policy, p.steps, f"{p.wait_share:.1%}", f"{p.step_seconds:.1f}", f"{p.wait_seconds:.1f}", p.kept,
         p.consumed, p.filtered, p.stale)
        for p in report.policies
    ]  # fmt: skip
    print_table(("policy", "steps", "waits", "s/step", "s waited", "kept", "consumed", "filtered", "stale"), rows)
    sys.stdout.write("\n")
    lines = [
        (w.worker, w.status, w.slots, f"{w.busy:.1%}", w.trajectories, w.usable, w.tokens,
         round(w.tokens_per_second, 1))
        for w in report.workers
    ]  # fmt: skip
    print_table(("worker", "status", "slots", "busy", "trajectories", "usable", "tokens", "tokens/s"), lines)
    sys.stdout.flush()
