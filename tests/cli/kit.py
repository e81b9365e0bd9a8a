"""The command line in this process, and commands that end as tests ask for."""

import json
from typing import Any

import click
from click.testing import CliRunner, Result

from onnxq.cli import cli
from onnxq.cli.group import CommandGroup

# With the settings of the group: a command keeps the names of its option for help from its first context.
CONTEXT = click.Context(cli, **cli.context_settings)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def read(*args: object) -> Any:
    """The JSON that a command prints."""
    return json.loads(run(*args, "--json").stdout)


def run_failing(error: BaseException, *args: str) -> Result:
    """A command that raises the error."""

    @click.command("fail")
    @click.option("--json", is_flag=True)
    def fail(json: bool) -> None:
        raise error

    group = CommandGroup("t")
    group.get_command = lambda ctx, name: fail
    return CliRunner().invoke(group, ["fail", *args])


def find_command(name: str) -> click.Command:
    return cli.get_command(CONTEXT, name)
