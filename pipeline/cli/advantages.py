"""``headrace advantages``: installed advantages; write and try one."""

from headrace.pipeline.cli.plugin_kinds import plugin_commands

__all__ = ("app",)

app = plugin_commands("advantages", "What rewards become in training: installed advantages; write and try one.")
