"""A command that runs a function of `onnxq.commands`, and a group that turns exceptions into exit codes."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from importlib import import_module
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

import click

from onnxq.cli.options import JSON, QUIET, group_options, make_options, name_beside, name_options
from onnxq.errors import (
    ModelError,
    OnnxqError,
    OutputError,
    dump_json,
    escape_line,
    escape_lines,
    replace_surrogates,
    suggest_names,
)
from onnxq.sites import JsonObject, Settings
from onnxq.wording import use_translation

if TYPE_CHECKING:
    from onnxq.report.terminal import TextView


# Exit code of an error that the user can mend.
USER = 1


def error_fields(error: OnnxqError, exit_code: int = USER, **more: str) -> JsonObject:
    """The error as JSON values, with options in the place of parameters. more: further fields, e.g. a traceback."""
    texts = {
        "code": error.code,
        "kind": error.kind,
        "subject": name_options(error.subject),
        "cause": name_options(error.cause),
        "fix": name_options(error.fix),
        "file": error.file,
        **more,
    }
    # File names may hold bytes that are not UTF-8; JSON must.
    plain = {key: replace_surrogates(text) for key, text in texts.items()}
    details = [replace_surrogates(name_options(line)) for line in error.details]
    return {**plain, "details": details, "line": error.line, "exit": exit_code}


def print_error(error: OnnxqError, exit_code: int = USER) -> int:
    """Print the error to stderr; returns the exit code. For commands that have already shown their result."""
    print_line(name_options(error.join_lines(f"error[{error.code}]: {error.fault}")))
    return exit_code


def show_outcome(result: object, view: TextView) -> int:
    """Show a result, and behind it the error that the command ends with in spite of it; returns the exit code."""
    # Here, since --help and usage errors need none of it.
    from onnxq.commands.results import find_fault, show

    fault, exit_code = find_fault(result)
    show(result, view, error=None if fault is None else error_fields(fault, exit_code))
    return 0 if fault is None else print_error(fault, exit_code)


def print_line(text: str) -> None:
    """Print to stderr; where that is full or its reader gone, nobody can be told."""
    try:
        click.echo(escape_lines(text), err=True)
    except OSError:
        discard_stream(sys.stderr)


def discard_stream(stream: IO[str]) -> None:
    """Let a stream that cannot be written swallow the rest: Python would complain at exit, flushing it."""
    with suppress(OSError, ValueError):  # ValueError: it is no file, as in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _discard_unwritten() -> None:
    """Discard what the standard streams hold and cannot write."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard_stream(stream)


def _has_lost_reader(stream: IO[str]) -> bool:
    """True for a pipe that nobody reads any more, and on Windows, which does not tell."""
    if not hasattr(select, "poll"):
        return True
    with suppress(OSError, ValueError):  # ValueError: it is no file, as in a test
        pipe = select.poll()
        pipe.register(stream.fileno(), 0)
        return bool(pipe.poll(0))
    return False


@contextmanager
def _forgive_closed_pipe() -> Iterator[None]:
    """End the command as done where the reader of its pipe has gone (`onnxq inspect … | head`): click would fail it."""
    try:
        yield
    except BrokenPipeError as error:
        # A pipe to an engine may break as well, which is no end that anybody asked for.
        if not (_has_lost_reader(sys.stdout) or _has_lost_reader(sys.stderr)):
            raise
        _discard_unwritten()
        raise click.exceptions.Exit(DONE) from error


# SIGINT, SIGTERM and SIGHUP as an exception, so that a command cleans up before it ends.
# Only the command line does this: the library leaves signals to the program that uses it.

# Seconds in which a second signal is ignored: a closed terminal sends two (the system and the shell), an impatient user
# too, and cleaning up must not be interrupted.
_PATIENCE = 2.0
# By name, since Windows has no SIGHUP.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Stopped(KeyboardInterrupt):
    """A signal asked the command to stop. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Stops:
    """The number of the first signal, 0 before one; it is kept also where a library swallows the exception."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler: raise Stopped, except shortly after an earlier signal."""
        now = time.monotonic()
        if self.number and now < self._since + _PATIENCE:
            return
        self.number = self.number or number
        self._since = now
        raise Stopped(number)


@contextmanager
def catch_signals() -> Iterator[Stops]:
    """Raise Stopped for SIGINT, SIGTERM and SIGHUP while the block runs.

    Ignored signals stay ignored, as `nohup` and background jobs of a shell need it; signals that the calling program
    handles stay with it.
    """
    stops = Stops()
    before = {}
    # Python lets only the main thread set handlers.
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, stops)
    try:
        yield stops
    finally:
        for number, handler in before.items():
            # A stopped process is about to exit with its own code: no second signal may end it before.
            signal.signal(number, signal.SIG_IGN if stops.number else handler)


# Exit codes; that of errors that the user can mend is `errors.USER`. 70: EX_SOFTWARE of sysexits.h.
DONE = 0
USAGE = 2
REFUSED = 3
DEFECT = 70
# Exit code of a command that a signal stopped: this plus the signal's number, as shells have it.
SIGNALLED = 128


# Errors of writing where nothing is wrong with the name: no room, a quota, a device, a stream that is open for reading.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class ModelCommand(click.Command):
    """A command that shows the result of a function; errors about its one model, MODEL or --model, name the file.

    function: "module:function" in `onnxq.commands`. progress: the title of the step shown meanwhile; "" for short ones.
    takes: the `Command` whose options of the configuration it takes, which the function gets as `overrides`. ending: in
    place of MODEL's, of the output where none is named.
    """

    def __init__(
        self,
        name: str,
        title: str,
        text: str,
        parameters: list[click.Parameter],
        *,
        function: str,
        progress: str = "",
        takes: str = "",
        ending: str = "",
    ) -> None:
        # Last, those of what is shown; --json and --quiet every command has.
        own = [param for param in parameters if param.name not in ("verbose", "top")]
        super().__init__(
            name,
            short_help=title,
            help=text,
            params=[*own, JSON, *(param for param in parameters if param not in own), QUIET],
            callback=self.run_function,
        )
        self.function = function
        self.progress = progress
        self.takes = takes
        self.ending = ending
        self.overrides: list[click.Parameter] = []

    def add_overrides(self) -> None:
        """Add the options of the configuration, which has to be loaded for them, in front of --json."""
        if self.takes and not self.overrides:
            self.overrides = make_options(self.takes)
            first = self.params.index(JSON)
            self.params[first:first] = self.overrides

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line. Empty words are refused: most are a shell's variables that were never set."""
        rest = super().parse_args(ctx, args)
        for param in self.params:
            value = ctx.params.get(param.name)
            if "" in (value if isinstance(value, tuple) else (value,)):
                raise click.BadParameter("it is empty.", ctx, param)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups: of some commands there are fifty."""
        if not self.takes:
            super().format_options(ctx, formatter)
            return
        for title, params in group_options(self.get_params(ctx), self.takes).items():
            # Arguments, of which click has records too, stand in the usage and in the text below it.
            options = [param for param in params if isinstance(param, click.Option)]
            records = [record for param in options if (record := param.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A ModelError without a file, e.g. of a node, gets that of the model."""
        # Here, since --help and usage errors need none of it.
        from onnxq.report.terminal import TextView

        arguments = ctx.params
        view = {
            field.name: arguments.pop(field.name)
            for field in fields(TextView)
            if field.name in arguments
        }
        overrides = {param.name: arguments.pop(param.name) for param in self.overrides}
        if overrides:
            arguments["config"] = overrides.pop("config")
            settings = dict(overrides.pop("settings"))
            overrides = {
                name: value for name, value in overrides.items() if value not in (None, ())
            }
            arguments["overrides"] = overrides | settings
        arguments["view"] = TextView(**view)
        try:
            return super().invoke(ctx)
        except ModelError as error:
            # NOTE: of two models it is not known which one the error is about.
            if error.file or not arguments.get("model") or arguments.get("quantized") is not None:
                raise
            raise error.name_file(arguments["model"]) from error

    def run_function(self, view: TextView, strict: bool = False, **arguments: Any) -> int:
        """Run the command's function and show its result; returns the exit code."""
        # Beside the model, so that a command without options leaves a file that can be found.
        if self.ending and not arguments["out"] and not arguments.get("check"):
            arguments["out"] = name_beside(arguments["model"], self.ending)
        # Before the progress begins: loading takes over a second, and a command that is as short as that shows none.
        module, name = self.function.split(":")
        function = getattr(import_module(f"onnxq.commands.{module}"), name)
        if self.progress:
            from onnxq.backends import list_backends
            from onnxq.report.live import show_progress

            # These are loaded as they are asked for, which takes as long.
            tuple(list_backends())

            files = _list_inputs(arguments)
            subject = arguments.get("quantized") or arguments.get("model")
            title = self.progress.format(**arguments, subject=subject, count=len(files))
            with show_progress(title, *files, quiet=view.quiet) as progress:
                result = function(**arguments, progress=progress)
        else:
            result = function(**arguments)
        # Behind the progress, whose lines would break into the result.
        code = show_outcome(result, view)
        # Refusals fail the command only on request: the file that is written is right without them.
        return code or (REFUSED if strict and result.report.refusals else DONE)


def _list_inputs(arguments: Settings) -> list[str]:
    """The files that a command reads, of which large ones take time."""
    files = [arguments.get(name) for name in ("model", "quantized", "plan")]
    return [*filter(None, files), *arguments.get("models", ())]


class CommandGroup(click.Group):
    """Commands in the order in which a newcomer meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in their order."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lines of the help without loading the configuration, which `get_command` does."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, str(command.short_help)) for name, command in self.commands.items()]
            )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One command with all its options; None for an unknown name."""
        command = self.commands.get(cmd_name)
        if isinstance(command, ModelCommand):
            command.add_overrides()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the arguments. An unknown one fails with the nearest names."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(f"no command {name!r}; {suggest_names(name, self.commands)}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the words, which may print the help."""
        with _forgive_closed_pipe():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the words name."""
        with _forgive_closed_pipe():
            return super().invoke(ctx)

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any
    ) -> Any:
        """Run a command and exit with a documented code. No exception passes this function but SystemExit."""
        # click would print and exit by itself.
        extra.pop("standalone_mode", None)
        words = list(sys.argv[1:] if args is None else args)
        # Not from click: the command line may be wrong before it has parsed the option. Behind "--" it is an argument.
        as_json = "--json" in (words[: words.index("--")] if "--" in words else words)
        _open_closed_streams()
        with catch_signals() as stops:
            try:
                with use_translation(name_options):
                    result = super().main(words, prog_name, standalone_mode=False, **extra)
                code = result if isinstance(result, int) else DONE
            except BaseException as error:
                # Where a library turned the exception of a signal into one of its own, it is still that signal.
                code = _report_stop(stops.number) if stops.number else _report_error(error, as_json)
            sys.exit(code)


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed: a file opened later would get their number, and their text."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _report_error(error: BaseException, as_json: bool) -> int:
    """Print an exception; returns its exit code. Raises it again where it is no fault (SystemExit)."""
    if isinstance(error, click.ClickException):
        return _print_document(_report_usage(error), USAGE, as_json)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return _report_stop(signal.SIGINT)
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return _report_unwritable(error, as_json)
    if isinstance(error, MemoryError):
        fix = "lower `batch=…`, or bound it with `memory_limit=…`"
        error = MemoryFault("memory", "not enough of it", fix)
    if isinstance(error, OnnxqError):
        return _print_document(error, print_error(error), as_json)
    if not isinstance(error, Exception):
        raise error
    text = "".join(traceback.format_exception(error))
    print_line(text.rstrip())
    print_line(f"this is a defect of onnxq, not yours{_REPORT}")
    fault = Defect(type(error).__name__, str(error), f"this is not yours to mend{_REPORT}")
    return _print_document(fault, DEFECT, as_json, traceback=text)


def _report_unwritable(error: OSError, as_json: bool) -> int:
    """Print that a stream or a temporary file could not be written; returns the exit code."""
    # Python does not say which; a file that was asked for has had its error before.
    where = str(error.filename or "the standard output or a temporary file")
    fix = "free some space, or send the report elsewhere"
    fault = OutputError(where, f"cannot be written ({error.strerror})", fix, code="Q604")
    print_error(fault)
    try:
        return _print_document(fault, USER, as_json)
    except OSError:
        return USER
    finally:
        _discard_unwritten()


def _report_stop(number: int) -> int:
    print_line("stopped; nothing half-written is left")
    return SIGNALLED + number


# Joined to the message and to the fix of a defect.
_REPORT = "; please report it with the traceback and the model if you can"


class UsageFault(OnnxqError):
    """The command line is wrong."""

    kind = "usage"
    default_code = "Q001"


class MemoryFault(OnnxqError):
    """Python got no memory."""

    kind = "memory"
    default_code = "Q002"


class Defect(OnnxqError):
    """An exception that nobody foresaw."""

    kind = "defect"
    default_code = "Q003"


def _report_usage(error: click.ClickException) -> OnnxqError:
    """Print the usage and the fault of a command line; the help alone where no argument was given."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    fault = UsageFault(ctx.command_path if ctx else "onnxq", error.format_message(), "see --help")
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return fault
    if ctx is not None:
        print_line(f"{ctx.get_usage()}\nTry '{ctx.command_path} --help' for help.\n")
    print_line(f"error[{fault.code}]: {escape_line(fault.cause)}")
    return fault


def _print_document(error: OnnxqError, exit_code: int, as_json: bool, **more: str) -> int:
    """Print the JSON document of an error, where --json was given; returns the exit code."""
    if as_json:
        try:
            click.echo(dump_json({"schema": 1, "error": error_fields(error, exit_code, **more)}))
        except BrokenPipeError:
            _discard_unwritten()
    return exit_code
