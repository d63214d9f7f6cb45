"""``headrace verify``: one line for each property with its count; exit code 1 on any breach."""

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from headrace.pipeline.cli.arguments import Bootstrap, Folder, Format, Output, command_group, print_json
from headrace.schemas.errors import EXIT_FAILURE

__all__ = ("app",)

app = command_group("Prove from its topics that a run lost and repeated nothing.")


@app.command()
def verify(
    folder: Folder,
    output: Output = Format.text,
    bootstrap: Bootstrap = "",
    show: Annotated[int, typer.Option(min=0, help="Breaches to print for each property.")] = 10,
) -> None:
    """Read the topics, checkpoints and weights of a run and check what the protocol promises.

    Starts the local broker of a finished run by itself. Exit codes: 0 all properties hold, 1 a breach.
    """
    from headrace.pipeline.launch.folder import RunFolder
    from headrace.pipeline.launch.local_broker import broker_of
    from headrace.pipeline.verify import verify_run

    run = RunFolder.existing(folder)
    with broker_of(run, bootstrap) as address:
        proofs = verify_run(run, run.read_config(), address)
    if output is Format.json:
        print_json({"holds": not any(p.breaches for p in proofs), "properties": [asdict(p) for p in proofs]})
    else:
        for proof in proofs:
            mark = "BROKEN" if proof.breaches else "ok"
            note = f"  ({proof.note})" if proof.note else ""
            sys.stdout.write(f"{mark:6}  {proof.count:>8} {proof.unit:15} {proof.name}{note}\n")
            for breach in proof.breaches[:show]:
                sys.stdout.write(f"        {breach}\n")
            if len(proof.breaches) > show:
                sys.stdout.write(f"        and {len(proof.breaches) - show} more\n")
    if any(proof.breaches for proof in proofs):
        raise typer.Exit(EXIT_FAILURE)
