"""``headrace environments``: installed environments; write and try one."""

from headrace.pipeline.cli.plugin_kinds import plugin_commands

__all__ = ("app",)

app = plugin_commands("environments", "What agents act in: installed environments; write and try one.")
