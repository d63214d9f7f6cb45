"""``headrace workflows``: installed workflows; write and try one."""

from headrace.pipeline.cli.plugin_kinds import plugin_commands

__all__ = ("app",)

app = plugin_commands("workflows", "How episodes are played: installed workflows; write and try one.")
