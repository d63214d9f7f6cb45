"""Which workflow a stream has, and in which one a policy is evaluated, beside which others."""

from headrace.connectors.plugins import load
from headrace.pipeline.workflows.workflow import Workflow, make_workflow
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError

__all__ = ("evaluated_stream", "evaluated_with", "workflow_of")


def workflow_of(config: RunConfig, stream: str) -> Workflow:
    """The workflow of a stream, made with its options. Raises ConfigurationError that names the stream."""
    section, names = config.streams[stream], config.policy_names()
    policies = {names[index]: index for index in config.stream_policies(stream)}
    try:
        return make_workflow(section.workflow, section.workflow_options, policies)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("streams.S.", f"streams.{stream}.")) from error


def evaluated_stream(config: RunConfig, policy: int) -> str:
    """The stream whose workflow evaluates a policy: the first that the policy belongs to."""
    return next((s for s in config.streams if policy in config.stream_policies(s)), next(iter(config.streams)))


def evaluated_with(config: RunConfig, policy: int) -> tuple[int, ...]:
    """The policies that an evaluation of one asks for: itself first, then those that its workflow needs beside it.

    In a workflow with ``team`` set, the policies of a stream play one episode together.
    """
    stream = evaluated_stream(config, policy)
    if not getattr(load("headrace.workflows", config.streams[stream].workflow), "team", False):
        return (policy,)
    return (policy, *(p for p in config.stream_policies(stream) if p != policy))
