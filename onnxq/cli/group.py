"""A command group that imports its commands late, and the boundary where errors become exit codes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from onnxq.cli.signals import stopping
from onnxq.errors import OnnxqError
from onnxq.files import readable
from onnxq.nearest import did_you_mean

DONE, USER, USAGE, REFUSED, UNMET, DEFECT = 0, 1, 2, 3, 4, 70
# Stopped by a signal: this and its number, as shells say it.
SIGNALLED = 128


class LazyGroup(click.Group):
    """Commands by the module that defines `command`; imported one by one, when needed."""

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = dict(modules)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which a newcomer meets them."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command; None for an unknown name."""
        if cmd_name not in self._modules:
            return None
        command: click.Command = import_module(self._modules[cmd_name]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest names for an unknown command."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(f"no command {name!r}; {did_you_mean(name, self._modules)}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> Any:
        """Run and exit with a documented code; the only place where an exception ends."""
        extra.pop("standalone_mode", None)
        with stopping() as stops:
            try:
                result = super().main(args, prog_name, standalone_mode=False, **extra)
                code = result if isinstance(result, int) else DONE
            except BaseException as error:
                # Where a library turned the exception of a signal into one of its own, it is still that signal.
                code = _stopped(stops.number) if stops.number else _code_of(error)
            sys.exit(code)


def _code_of(error: BaseException) -> int:
    """Tell the user about an exception; the exit code for it. Raises it again when it is no fault."""
    if isinstance(error, click.ClickException):
        error.show()
        return USAGE
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return _stopped(signal.SIGINT)
    if isinstance(error, OnnxqError):
        _say(f"error: {error}")
        return USER
    if isinstance(error, BrokenPipeError):
        # The reader of a pipe has gone (`onnxq inspect … | head`); silence Python's own complaint at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    if isinstance(error, MemoryError):
        _say("error: memory: not enough of it\n  fix: lower --batch, or bound it with --memory-limit")
        return USER
    if not isinstance(error, Exception):
        raise error
    traceback.print_exception(error)
    _say("this is a defect of onnxq, not yours; please report it with the text above and the model if you can")
    return DEFECT


def _stopped(number: int) -> int:
    with suppress(OSError):  # the terminal may be gone: that is what SIGHUP says
        _say("stopped; nothing half-written is left")
    return SIGNALLED + number


def _say(text: str) -> None:
    click.echo(readable(text), err=True)
