"""``headrace datasets``: installed datasets; write and try one."""

from headrace.pipeline.cli.plugin_kinds import plugin_commands

__all__ = ("app",)

app = plugin_commands("datasets", "What prompts are read from: installed datasets; write and try one.")
