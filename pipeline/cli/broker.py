"""`headrace broker`: the local broker as a command of its own.

Options in, a serving process out; it ends on SIGTERM or Ctrl-C, or with the process that started it when asked to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import command_group

__all__ = ("app",)

app = command_group("The local broker by itself.")


@app.command()
def broker(
    data: Annotated[Path, typer.Option(help="Folder for topics and state; made when missing.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 chooses a free one and prints it.")] = 9092,
    auto_create: Annotated[bool, typer.Option(help="Create a topic when a client first asks for it.")] = True,
    partitions: Annotated[int, typer.Option(help="Partitions of topics that are created without a number.")] = 4,
    exit_with_parent: Annotated[bool, typer.Option(help="Stop when the process that started this one ends.")] = False,
) -> None:
    """Serve the Kafka protocol from a folder: single node, loopback, plaintext, unreplicated."""
    from headrace.connectors.broker.launch import run

    run(data, port, auto_create, partitions, exit_with_parent)
