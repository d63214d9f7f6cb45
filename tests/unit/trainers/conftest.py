"""One process group for all tests of a session: DeepSpeed keeps the first that it sees."""

from collections.abc import Iterator

import pytest

from headrace.trainers.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """This process as the only rank."""
    ranks = Ranks.from_environment(group=True)
    yield ranks
    ranks.close()
