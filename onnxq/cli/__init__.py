"""The command line: a command parses its options, calls one function of `onnxq.commands` and shows the result."""

from onnxq.cli.commands import cli, main

__all__ = ["cli", "main"]
