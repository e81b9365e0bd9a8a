"""The command line. A command parses its options, calls one function of the pipeline and shows the report: no logic."""

from onnxq.cli.app import cli, main

__all__ = ["cli", "main"]
