"""The command line: `odb demo | verify | chaos | plan | bench | trace`."""

from __future__ import annotations

import typer

from odb.cli.bench import app as bench
from odb.cli.chaos import chaos
from odb.cli.demo import demo
from odb.cli.plan import plan
from odb.cli.trace import app as trace
from odb.cli.verify import verify

app = typer.Typer(
    name="odb",
    help="A verified online dynamic batcher for distributed LLM training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.command("verify")(verify)
app.command("chaos")(chaos)
app.command("plan")(plan)
app.add_typer(bench, name="bench")
app.add_typer(trace, name="trace")


def main() -> None:
    """Entry point of the `odb` console script."""
    app()
