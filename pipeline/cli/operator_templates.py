"""The code and the test that a new operator begins with, by what it does: before rollout, with closed groups, or at
serving.
"""

from headrace.pipeline.cli.plugin_templates import Beginning

__all__ = ("OPERATORS",)

_TEST = '''"""The operator keeps what every operator must keep."""

from headrace.pipeline.operator_conformance import assert_conforms


def test_it_decides_the_same_each_time_and_after_every_restart() -> None:
    assert_conforms("headrace_$name.operator:$cls")
'''

_TOML = '[[operators]]\ntype = "$name"'

_GROUPS = '''"""What $name does to a group, with its formula and its source."""

from typing import ClassVar

from headrace.pipeline.operators.operator import GroupDraft, Kind, OperatorConfiguration, OperatorContext

__all__ = ("$cls", "${cls}Configuration")


class ${cls}Configuration(OperatorConfiguration):
    """The keys of its `[[operators]]` entry, with defaults."""


class $cls:
    """Passes every group on."""

    kind: ClassVar[Kind] = "$operator_kind"
    Configuration: ClassVar[type[OperatorConfiguration]] = ${cls}Configuration

    def __init__(self, configuration: ${cls}Configuration) -> None:
        self._given = configuration

    def open(self, context: OperatorContext) -> None:
        """Read what the store remembers."""

    def process(self, record: GroupDraft, context: OperatorContext) -> None:
        """End the group by `context.emit(draft)` or `context.drop("a_reason", "the numbers that decided it")`."""
        context.emit(record)

    def on_timer(self, timer: str, context: OperatorContext) -> None:
        """A timer of `context.schedule` is due."""

    def close(self) -> None:
        """Let go of what `open` took."""
'''

_PROMPT = '''"""Which prompts $name lets become groups, with its formula and its source."""

from typing import ClassVar

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_operator import (
    Candidate,
    Outcome,
    PromptConfiguration,
    PromptContext,
    PromptOperator,
)

__all__ = ("$cls", "${cls}Configuration")


class ${cls}Configuration(PromptConfiguration):
    """The keys of its `[[operators]]` entry, with defaults."""


class $cls(PromptOperator):
    """Admits every prompt."""

    Configuration: ClassVar[type[OperatorConfiguration]] = ${cls}Configuration

    def __init__(self, configuration: ${cls}Configuration) -> None:
        self._given = configuration

    def open(self, context: PromptContext) -> None:
        """Read what the store remembers."""

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        """End the prompt by `context.admit()` or `context.drop("a_reason", "the numbers that decided it")`."""
        context.admit()

    def outcome(self, outcome: Outcome, context: PromptContext) -> None:
        """Learn from a group that has closed; put what has to survive into `context.store()`."""
'''

_SETTINGS = '''"""Which settings $name gives a run, and why."""

from typing import ClassVar

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_operator import SettingsOperator
from headrace.schemas.config import PolicyConfig, StreamConfig

__all__ = ("$cls", "${cls}Configuration")


class ${cls}Configuration(OperatorConfiguration):
    """The keys of its `[[operators]]` entry, with defaults."""


class $cls(SettingsOperator):
    """Leaves every setting as it is."""

    Configuration: ClassVar[type[OperatorConfiguration]] = ${cls}Configuration

    def __init__(self, configuration: ${cls}Configuration) -> None:
        self._given = configuration

    def policy(self, name: str, section: PolicyConfig) -> PolicyConfig:
        """The section of a policy as it shall be."""
        return section

    def stream(self, name: str, section: StreamConfig) -> StreamConfig:
        """The section of a stream as it shall be."""
        return section
'''

_SERVING = '''"""What $name decides at serving, with its formula and its source."""

from collections.abc import Sequence
from typing import ClassVar

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.serving import Candidate, Moment, ServingKind

__all__ = ("$cls", "${cls}Configuration")


class ${cls}Configuration(OperatorConfiguration):
    """The keys of its `[[operators]]` entry, with defaults."""


class $cls:
    """__DOES__"""

    kind: ClassVar[ServingKind] = "$operator_kind"
    Configuration: ClassVar[type[OperatorConfiguration]] = ${cls}Configuration

    def __init__(self, configuration: ${cls}Configuration) -> None:
        self._given = configuration

'''

_METHODS = {
    "staleness": (
        "Serves everything within the bound.",
        '''    def refusal(self, candidate: Candidate, moment: Moment) -> str:
        """Empty, or `a_reason: the numbers that decided it`."""
        return ""
''',
    ),
    "replay": (
        "Replays what entered the pool last.",
        '''    def capacity(self, batch_groups: int) -> int:
        """Groups that the pool holds at most."""
        return 4 * batch_groups

    def choose(self, pool: Sequence[Candidate], count: int, moment: Moment) -> Sequence[int]:
        """Up to `count` different groups of the pool."""
        newest = sorted(pool, key=lambda candidate: -candidate.entered)
        return [candidate.group.group for candidate in newest[:count]]
''',
    ),
    "order": (
        "Serves groups by admission.",
        '''    def rank(self, candidate: Candidate, moment: Moment) -> tuple[float, ...]:
        """The smallest is served first."""
        return (candidate.group.group,)
''',
    ),
    "batch": (
        "Deals groups out to the lanes in turn.",
        '''    def place(self, groups: Sequence[Candidate], lanes: int) -> Sequence[int]:
        """The lane of each group."""
        return [number % lanes for number in range(len(groups))]
''',
    ),
}

OPERATORS = {
    "settings": Beginning(code=_SETTINGS, test=_TEST, toml=_TOML),
    "prompt": Beginning(code=_PROMPT, test=_TEST, toml=_TOML),
    **{kind: Beginning(code=_GROUPS, test=_TEST, toml=_TOML) for kind in ("shape", "filter", "downsample")},
    **{
        kind: Beginning(code=_SERVING.replace("__DOES__", does) + methods, test=_TEST, toml=_TOML)
        for kind, (does, methods) in _METHODS.items()
    },
}
"""What an operator does to how it begins."""
