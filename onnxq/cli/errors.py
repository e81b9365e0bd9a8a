"""Errors on the command line: a line on stderr, and with --json one document on stdout."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

import click

from onnxq.cli.options import name_options
from onnxq.errors import OnnxqError
from onnxq.escapes import dump_json, escape_lines, replace_surrogates

if TYPE_CHECKING:
    from onnxq.report.terminal import TextView

# Exit code of an error that the user can mend.
USER = 1


def error_fields(error: OnnxqError, exit_code: int = USER, **more: str) -> dict[str, Any]:
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
    plain: dict[str, Any] = {key: replace_surrogates(text) for key, text in texts.items()}
    details = [replace_surrogates(name_options(line)) for line in error.details]
    return {**plain, "details": details, "line": error.line, "exit": exit_code}


def error_document(fields: dict[str, Any]) -> str:
    """The JSON document of an error without a report."""
    return dump_json({"schema": 1, "error": fields})


def error_text(error: OnnxqError) -> str:
    """The lines `error[Q303]: subject: cause` and, indented, the fix and the details."""
    return name_options(error.join_lines(f"error[{error.code}]: {error.subject}: {error.cause}"))


def print_error(error: OnnxqError, exit_code: int = USER) -> int:
    """Print the error to stderr; returns the exit code. For commands that have already shown their result."""
    print_line(error_text(error))
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
