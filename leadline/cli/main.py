"""The `leadline` command: its subcommands, each a function of its own file, and how their errors reach a person."""

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import leadline

COMMANDS = {
    "generate": "Continue a text.",
    "chat": "Talk with a model.",
    "serve": "Serve a model to clients of the OpenAI API.",
    "bench": "Measure throughput and latency.",
    "eval": "Mark a model's answers to tasks with known answers.",
    "convert": "Rewrite a checkpoint in another layout or weight format.",
    "inspect": "Show what a model is made of, its bytes, and which GPUs hold it.",
}
"""Subcommand -> its line of help. `leadline/cli/<name>.py` defines the function `<name>`, imported when it is run."""


class Commands(TyperGroup):
    """Imports a subcommand only to run it: `leadline --help` needs no PyTorch.

    A ValueError or OSError is a sentence for the user: it goes to stderr, without its traceback, and the exit status
    is 1. Wrong usage gives 2. Any other exception is our bug and shows its traceback.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """(name, the command to run, its arguments). Raises click's UsageError for an unknown name."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand, and turn the errors that are meant for people into sentences."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has left; typer ends quietly
        except (ValueError, OSError) as error:
            if ctx.params["debug"]:
                raise
            print(f"leadline: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


def load_command(name: str) -> Any:
    """Import `leadline.cli.<name>` and build the click command of its function `<name>`."""
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command(name)(getattr(importlib.import_module(f"leadline.cli.{name}"), name))
    return typer.main.get_command(command)


app = typer.Typer(cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"leadline {leadline.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Leadline, a DeepSeek-V4 inference engine."""


def main() -> None:
    """The console entry point."""
    app(prog_name="leadline")
