"""What the kits of operators share: turns in which a stage may be killed, the state that it keeps, and what opening it
again must leave as it is.
"""

from headrace.connectors.conformance import Check
from headrace.pipeline.runtime.driver import TopologyDriver

__all__ = ("state_bytes", "state_check", "state_of", "turns")


def turns(driver: TopologyDriver, stage: str, *, killed: bool, most: int) -> None:
    """Let a stage work until it comes to rest, at most so often; ``killed`` before and after every commit."""
    for _ in range(most):
        if killed:
            driver.turn(stage, crash="before_commit")
        if not driver.turn(stage, crash="after_commit" if killed else "none"):
            break


def state_of(driver: TopologyDriver, stage: str, prefix: bytes) -> dict[bytes, bytes]:
    """The entries of the stage's only task whose keys begin with ``prefix``."""
    return dict(driver.tasks[stage, 0].store.scan(prefix))


def state_bytes(state: dict[bytes, bytes]) -> int:
    """Bytes of keys and values."""
    return sum(len(key) + len(value) for key, value in state.items())


def state_check(driver: TopologyDriver, stage: str, prefix: bytes) -> Check:
    """Opening from the store must change nothing of it."""
    before = state_of(driver, stage, prefix)
    driver.crash(stage)
    driver.stage_of(stage)
    driver.turn(stage)
    if state_of(driver, stage, prefix) == before:
        return Check("state", True, f"{len(before)} keys are as they were after another open")
    return Check("state", False, "open changes the state that it reads")
