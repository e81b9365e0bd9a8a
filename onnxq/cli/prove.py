"""`onnxq prove`: the kernels that an engine makes of a quantized model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import show_outcome
from onnxq.cli.group import ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("prove", cls=ModelCommand, takes=Command.PROVE)
@click.argument("model")
@options.data
@options.make_output("Keep the engine, the log, the list of kernels, the timing cache.", "--save", metavar="FOLDER")
@options.force
@options.as_json
@options.verbose
@options.top
@options.quiet
def run_command(model: str, view: View, **given: Any) -> int:
    """Build the engine of MODEL and list the kernel, and its type, of every pair and every heavy node.

    With --engine ort also the weights that can overflow the 16-bit sums of x86 CPUs without VNNI; with --data how often
    they do, and the loss, computed exactly on any machine.

    Exits with 1 when the engine cannot be built, a node does not run in the type that --require asks for, or runs in
    one that --forbid names, or with --require-exact a weight can overflow.

    \b
    Examples:
      onnxq prove model.q.onnx --require-int8 'Conv'
      onnxq prove model.q.onnx --require float16 'MatMul*' --forbid float32
      onnxq prove model.q.onnx --engine ort --json > before.json
      onnxq prove model.q.onnx --compare before.json
      onnxq prove model.q.onnx --engine ort --require-exact --data samples.npz
    """
    from onnxq import report

    with report.show_progress(f"proving {model}", model, quiet=view.quiet) as progress:
        from onnxq import pipeline
        from onnxq.report.proofs import find_unmet_requirement, show_proof

        proof = pipeline.prove(model, progress=progress, **given)
    return show_outcome(show_proof, proof, view, find_unmet_requirement(proof))
