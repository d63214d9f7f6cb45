"""Every prompt becomes a group: what a run without an operator before rollout does, by name.

It is the curator ``accept_all`` of AstraFlow (spec of its data-algorithm hooks) and the control of an experiment.
"""

from typing import ClassVar

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_operator import Candidate, PromptContext, PromptOperator

__all__ = ("AcceptAll",)


class AcceptAll(PromptOperator):
    """Admits every prompt; there are no keys and no reasons."""

    Configuration: ClassVar[type[OperatorConfiguration]] = OperatorConfiguration

    def __init__(self, configuration: OperatorConfiguration) -> None:
        self._given = configuration

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        """Admit, and count it."""
        context.metrics.count("prompts_accepted", operator="accept_all")
        context.admit()
