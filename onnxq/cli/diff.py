"""`onnxq diff`: a quantized model against its float one, and engines against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.errors import error_fields, print_error
from onnxq.cli.group import ModelCommand
from onnxq.errors import VerificationError

if TYPE_CHECKING:
    from onnxq.engines.diff.model import Difference


def _parse_engines(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The engines of a list with commas, each once."""
    names = tuple(dict.fromkeys(part.strip() for part in (value or "").split(",") if part.strip()))
    for name in names:
        if name not in ("ort", "trt"):
            raise click.BadParameter(f"{name!r} is no engine; they are ort and trt")
    return names


# SQNR and cosine may be negative.
_FLOAT = options.FiniteFloat()


@click.command(
    "diff", cls=ModelCommand, short_help="Compare a quantized model with its float one, and engines with each other."
)
@click.argument("model", metavar="FLOAT")
@click.argument("quantized", metavar="QUANT")
@options.data
@options.library
@options.plugin
@options.provider
@click.option(
    "--config", metavar="PRESET|FILE", help="A YAML file for its `data` and `runtime` sections: images, libraries."
)
@click.option(
    "--engines",
    metavar="ort,trt",
    callback=_parse_engines,
    help="Engines that must run. [default: ort, and trt where it can]",
)
@click.option("--layers", is_flag=True, help="Compare every matching tensor inside, in the order of the network.")
@click.option("--bisect", is_flag=True, help="Find the smallest subgraph in which engines diverge.")
@click.option("--min-sqnr", type=_FLOAT, metavar="DB", help="Least SQNR of every output against float.")
@click.option("--min-cosine", type=_FLOAT, metavar="C", help="Least cosine similarity of every output with float.")
@click.option("--max-abs", type=_FLOAT, metavar="X", help="Largest absolute error of every output against float.")
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    metavar="K",
    default=1,
    show_default=True,
    help="Agreement: the share of the K largest along the last axis that both name.",
)
@click.option("--min-agreement", type=options.FiniteFloat(0, 1), metavar="P", help="Least agreement, 0 to 1.")
@click.option(
    "--min-engines",
    type=_FLOAT,
    metavar="DB",
    help="Least SQNR of every engine against ONNX Runtime without optimizations.",
)
@click.option("--save", metavar="FOLDER", help="Write results.json and inputs.json (Polygraphy's), diff.json, pieces.")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    default=16,
    show_default=True,
    help="Samples whose inputs and outputs --save writes.",
)
@click.option(
    "--load",
    metavar="RESULTS.json",
    multiple=True,
    help="Also compare results saved elsewhere, by --save or `polygraphy run --save-outputs`; repeatable.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    metavar="N",
    default=1,
    show_default=True,
    help="Threads of ONNX Runtime; 0: all.",
)
@click.option(
    "--memory-limit",
    metavar="SIZE",
    callback=options.parse_size,
    help="Bound on the inner tensors held at a time. [default: 1GiB]",
)
@click.option("--force", is_flag=True, help="Overwrite earlier results in FOLDER.")
@options.showing
@options.top
@options.quiet
def run_command(
    model: str, quantized: str, as_json: bool, verbose: bool, top: int | None, quiet: bool, **wanted: Any
) -> int:
    """Run FLOAT and QUANT on samples and say how far they are apart: ONNX Runtime off, on, and TensorRT.

    Exits with 1 when a tolerance is not met, or when an engine that must run does not: one named by --engines, else the
    one that QUANT was made for, TensorRT only where it is installed and has a GPU.

    \b
    Examples:
      onnxq diff model.onnx model.q.onnx --data samples.npz --min-sqnr 20
      onnxq diff model.onnx model.q.onnx --data samples.npz --layers --bisect --save out
      onnxq diff model.onnx model.q.onnx --load from-the-gpu-machine/results.json
    """  # fmt: skip
    from onnxq import report

    with report.show_progress(f"comparing {quantized} with {model}", model, quantized, quiet=quiet) as progress:
        from onnxq import pipeline

        found = pipeline.diff(model, quantized, progress=progress, **wanted)
    # After the comparison: the report is shown whether the tolerances hold or not.
    unmet = _find_unmet(found)
    report.show_difference(
        found, as_json=as_json, verbose=verbose, top=top, quiet=quiet, error=error_fields(unmet) if unmet else None
    )
    return print_error(unmet) if unmet else 0


def _find_unmet(found: Difference) -> VerificationError | None:
    """The error of the first tolerance that is not met, else of a required engine that did not run; None without."""
    if found.unmet:
        first, more = found.unmet[0], len(found.unmet) - 1
        rest = f"; and {more} more tolerance{'s' if more > 1 else ''} not met" if more else ""
        from onnxq.report import describe_unmet

        return VerificationError(f"output {first.output}", f"{describe_unmet(found, first)}{rest}", code="Q703")
    for name in found.missing:
        refusal = next(one for one in found.skipped if one.subject == name)
        return VerificationError(f"engine {name}", f"must run, and did not: {refusal.reason}", refusal.fix, code="Q704")
    return None
