"""``headrace version``: the version of the installed package."""

from importlib.metadata import version as installed

import typer

__all__ = ("app",)

app = typer.Typer(add_completion=False)


@app.command()
def version() -> None:
    """Print the version of the installed headrace."""
    typer.echo(f"headrace {installed('headrace')}")
