"""``headrace rewards``: installed rewards; write and try one."""

from headrace.pipeline.cli.plugin_kinds import plugin_commands

__all__ = ("app",)

app = plugin_commands("rewards", "What completions are worth: installed rewards; write and try one.")
