"""The command line: options in, one pipeline function called, its report shown. No logic lives here."""

from onnxq.cli.app import cli, main

__all__ = ["cli", "main"]
