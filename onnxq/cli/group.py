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

from onnxq.cli.errors import error_document, error_fields, say, say_error
from onnxq.cli.signals import stopping
from onnxq.cli.wording import name_options
from onnxq.errors import OnnxqError
from onnxq.nearest import did_you_mean
from onnxq.wording import speaking

DONE, USAGE, REFUSED, UNMET, DEFECT = 0, 2, 3, 4, 70
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
        given = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
        with stopping() as stops:
            try:
                with speaking(name_options):
                    result = super().main(given, prog_name, standalone_mode=False, **extra)
                code = result if isinstance(result, int) else DONE
            except BaseException as error:
                # Where a library turned the exception of a signal into one of its own, it is still that signal.
                code = _stopped(stops.number) if stops.number else _code_of(error, as_json)
            sys.exit(code)


def _code_of(error: BaseException, as_json: bool) -> int:
    """Tell the user about an exception; the exit code for it. Raises it again when it is no fault."""
    if isinstance(error, click.ClickException):
        return _print(_say_usage(error), USAGE, as_json)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return _stopped(signal.SIGINT)
    if isinstance(error, OnnxqError):
        return _print(error, say_error(error), as_json)
    if isinstance(error, BrokenPipeError):
        # The reader of a pipe has gone (`onnxq inspect … | head`); silence Python's own complaint at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    if isinstance(error, MemoryError):
        fix = "lower `batch=…`, or bound it with `memory_limit=…`"
        fault: OnnxqError = MemoryFault("memory", "not enough of it", fix)
        return _print(fault, say_error(fault), as_json)
    if not isinstance(error, Exception):
        raise error
    text = "".join(traceback.format_exception(error))
    say(text.rstrip())
    say(f"this is a defect of onnxq, not yours{_REPORT}")
    fault = Defect(type(error).__name__, str(error), f"this is not yours to mend{_REPORT}")
    return _print(fault, DEFECT, as_json, traceback=text)


def _stopped(number: int) -> int:
    with suppress(OSError):  # the terminal may be gone: that is what SIGHUP says
        say("stopped; nothing half-written is left")
    return SIGNALLED + number


_REPORT = "; please report it with the traceback and the model if you can"


class UsageFault(OnnxqError):
    """The command line is wrong."""

    kind, default_code = "usage", "Q001"


class MemoryFault(OnnxqError):
    """Python got no memory."""

    kind, default_code = "memory", "Q002"


class Defect(OnnxqError):
    """An exception that nobody foresaw."""

    kind, default_code = "defect", "Q003"


def _say_usage(error: click.ClickException) -> OnnxqError:
    """Print how the command is called, and what is wrong; the help alone where nothing was given."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    fault = UsageFault(ctx.command_path if ctx else "onnxq", error.format_message(), "see --help")
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return fault
    if ctx is not None:
        say(f"{ctx.get_usage()}\nTry '{ctx.command_path} --help' for help.\n")
    say(f"error[{fault.code}]: {fault.cause}")
    return fault


def _print(error: OnnxqError, exit_code: int, as_json: bool, **more: str) -> int:
    if as_json:
        click.echo(error_document(error_fields(error, exit_code, **more)))
    return exit_code
