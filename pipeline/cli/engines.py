"""``headrace engines``: installed engines; write and try one."""

from headrace.pipeline.cli.plugin_kinds import plugin_commands

__all__ = ("app",)

app = plugin_commands("engines", "What samples completions: installed engines; write and try one.")
