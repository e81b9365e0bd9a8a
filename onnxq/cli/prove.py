"""`onnxq prove`: the kernels that an engine makes of a quantized model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import error_fields, print_error
from onnxq.cli.group import ModelCommand
from onnxq.errors import VerificationError

if TYPE_CHECKING:
    from onnxq.engines.prove.proof import NodeProof, Proof

# Nodes named in an error.
_NAMED = 5


@click.command("prove", cls=ModelCommand, short_help="Build the engine and tell which kernels run in int8.")
@click.argument("model")
@click.option(
    "--engine",
    type=click.Choice(["tensorrt-rtx", "tensorrt", "ort"]),
    default=None,
    help="tensorrt-rtx builds without a GPU, tensorrt for the one in this machine, ort for this CPU. "
    "[default: the one that the plan in MODEL is for; tensorrt-rtx where it holds none]",
)
@click.option("--compute-capability", metavar="8.6", help="GPU to build for, tensorrt-rtx only. [default: 8.6]")
@click.option(
    "--require",
    nargs=2,
    metavar="TYPE PATTERN",
    multiple=True,
    help="Nodes (glob, /regular expression/, or an operator) that must run in a type: float16 'MatMul*'; repeatable.",
)
@click.option("--require-int8", metavar="PATTERN", multiple=True, help="The same for int8; repeatable.")
@click.option(
    "--forbid", metavar="TYPE", multiple=True, help="No heavy node may compute in it, e.g. float32; repeatable."
)
@click.option(
    "--require-exact", is_flag=True, help="No weight may overflow 16-bit sums on CPUs without VNNI; --engine ort only."
)
@options.data
@options.library
@options.plugin
@click.option(
    "--config", metavar="PRESET|FILE", help="A YAML file for its `data` and `runtime` sections: images, libraries."
)
@click.option(
    "--shapes",
    metavar="INPUT:MIN,OPT,MAX",
    multiple=True,
    help="Sizes of an input of no fixed size, e.g. x:1x3x224x224,4x3x224x224,8x3x224x224; repeatable.",
)
@click.option("--compare", metavar="PREVIOUS.json", help="List the changes since a proof that --json wrote.")
@click.option("--save", metavar="FOLDER", help="Keep the engine, the log, the list of kernels, the timing cache.")
@click.option("--reduce", is_flag=True, help="When the build fails or crashes, find the smallest part that does.")
@click.option(
    "--timeout",
    type=options.FiniteFloat(min=0, min_open=True),
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="Time a build may take.",
)
@click.option("--force", is_flag=True, help="Overwrite earlier results in FOLDER.")
@options.showing
@options.top
@options.quiet
def run_command(
    model: str, shapes: tuple[str, ...], as_json: bool, verbose: bool, top: int | None, quiet: bool, **wanted: Any
) -> int:
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

    with report.show_progress(f"proving {model}", model, quiet=quiet) as progress:
        from onnxq import pipeline

        # A wrong shape is an error of the library, with a code, not of click.
        from onnxq.engines.builder.shapes import parse_shapes

        proof = pipeline.prove(model, shapes=parse_shapes(shapes), progress=progress, **wanted)
    unmet = _find_unmet(proof)
    report.show_proof(
        proof, as_json=as_json, verbose=verbose, top=top, quiet=quiet, error=error_fields(unmet) if unmet else None
    )
    return print_error(unmet) if unmet else 0


def _explain(node: NodeProof) -> str:
    """Why a node is not quantized; of one that is, the types that its kernel reads and writes."""
    return node.reason or f"{node.node} runs in {node.type}: {node.types}"


def _find_unmet(proof: Proof) -> VerificationError | None:
    """The error of an engine that was not built or of a requirement that does not hold; None when all holds."""
    build = proof.build
    if not proof.built:
        told = "" if build.reduced is not None else "--reduce finds the smallest part that does this; "
        told = "--plugin takes the library that implements it; " if build.needs_plugin else told
        subject = f"node {build.node}" if build.node else (proof.source or "the model")
        return VerificationError(subject, f"{build.state}: {build.reason}", f"{told}--save keeps the log", code="Q705")
    for found in (one for one in proof.requirements if one.unmet):
        named = ", ".join(found.unmet[:_NAMED]) + (", …" if len(found.unmet) > _NAMED else "")
        option = f"--forbid {found.dtype}" if found.forbidden else f"--require {found.dtype}"
        told = f"{'in' if found.forbidden else 'not in'} {found.dtype} ({len(found.unmet)} in all)"
        return VerificationError(f"{option}: {named}", told, _explain(proof.node(found.unmet[0])), code="Q706")
    if not proof.holds:
        # Here, like the report itself, so that --help loads none of it.
        from onnxq.report import saturation_summary

        fix = "quantize the float model with onnxq (saturation: avoid, the default), or with 7-bit weights"
        return VerificationError("--require-exact", saturation_summary(proof.weights), fix, code="Q707")
    return None
