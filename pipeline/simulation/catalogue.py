"""All studies by name."""

from collections.abc import Mapping

from headrace.pipeline.simulation.agentic import AGENTIC
from headrace.pipeline.simulation.asynchrony import ASYNCHRONY
from headrace.pipeline.simulation.clusters import CLUSTERS
from headrace.pipeline.simulation.pools import POOLS
from headrace.pipeline.simulation.rollouts import ROLLOUTS
from headrace.pipeline.simulation.study import Study

__all__ = ("STUDIES",)

STUDIES: Mapping[str, Study] = {study.name: study for study in (*CLUSTERS, *ASYNCHRONY, *ROLLOUTS, *AGENTIC, *POOLS)}
"""Name -> study, in the order of the papers."""
