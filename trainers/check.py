"""``python -m headrace.trainers.check``: refuse what only a trainer would refuse, before a run leaves anything behind.

In: a run's configuration; out: exit code 0, or 78 with the reason: losses, advantages, backends and their options, data
that no loss corrects, critics that cannot be, sinks and their packages. No model is loaded and nothing is written.
"""

import argparse
import sys
from collections.abc import Sequence

from headrace.connectors.lifetime import exit_with
from headrace.connectors.plugins import load
from headrace.schemas.config import RunConfig, read_config

__all__ = ("check_settings", "main")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and check; returns the exit code (``schemas.errors``)."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.trainers.check", description="Check what a run's trainers would refuse."
    )
    parser.add_argument("--config", required=True, help="a run's resolved configuration")
    given = parser.parse_args(arguments)
    return exit_with(lambda: check_settings(read_config(given.config)))


def check_settings(config: RunConfig) -> None:
    """Check the trainers of all policies. Raises ConfigurationError that names the key."""
    from headrace.trainers.backends.deepspeed_engine import engine_settings
    from headrace.trainers.critic import check_critic
    from headrace.trainers.losses.aggregation import mode_named
    from headrace.trainers.losses.loss import configured
    from headrace.trainers.scoring import needs_of
    from headrace.trainers.sinks.fan_out import found_sinks
    from headrace.trainers.update import check_data

    found_sinks(config.metrics.sinks)
    for policy in config.policies:
        trainer = config.trainer_of(policy)
        loss = configured(load("headrace.losses", trainer.loss), trainer.loss_options, "trainer.loss_options")
        kind = load("headrace.advantages", trainer.advantage)
        advantage = configured(kind, trainer.advantage_options, "trainer.advantage_options")
        mode_named(trainer.aggregation)
        if not config.policies[policy].frozen:
            check_data(config, policy, loss)
        load("headrace.backends", trainer.backend)
        if trainer.backend == "deepspeed":
            engine_settings(trainer)
        if needs_of(advantage).values:
            check_critic(trainer)


if __name__ == "__main__":
    sys.exit(main())
