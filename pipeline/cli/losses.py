"""``headrace losses``: installed losses; write and try one."""

from headrace.pipeline.cli.plugin_kinds import plugin_commands

__all__ = ("app",)

app = plugin_commands("losses", "What training minimises: installed losses; write and try one.")
