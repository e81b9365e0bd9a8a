"""The commands of `onnxq`: arguments, options and help. Their options of the configuration are added when one is named,
their functions in `onnxq.commands` are imported when one runs."""

from __future__ import annotations

import click

from onnxq.cli.group import CommandGroup, ModelCommand
from onnxq.cli.options import DATA, FORCE, JSON, QUIET, STRICT, TOP, VERBOSE, Parsed, make_output
from onnxq.commands.explain import explain_code

# The codes are those of `group`.
_EPILOG = """\b
Exit codes:
  0    done
  1    something in the model, data or configuration must be mended, or a tolerance is not met
       (the message says what and how; `onnxq explain CODE` says more)
  2    the command line is wrong
  3    done, but with refusals, and --strict was given
  4    done, but --min-sqnr or --max-drop does not hold
  70   a defect of onnxq
  130  stopped with Ctrl-C; nothing half-written is left (129: by SIGHUP, 143: by SIGTERM)
"""
# Digits of a number of bits; the widest integers have 64.
_DIGITS = 3
# Parameters hold no state, so that commands can share them.
_MODEL = click.Argument(["model"])
_MODELS = click.Argument(["models"], metavar="MODEL...", nargs=-1, required=True)


def _parse_bits(text: str) -> tuple[str, int]:
    """The (pattern, bits) of PATTERN=N. The last "=" separates them: a /regex/ may hold others."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or not bits.strip().isdecimal() or len(bits) > _DIGITS:
        raise ValueError(f"{text!r} is not PATTERN=N, e.g. '/encoder/*=8'")
    return pattern, int(bits)


def _explain(code: str | None, as_json: bool) -> None:
    try:
        click.echo(explain_code(code, as_json=as_json))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


QUANTIZE = ModelCommand(
    "quantize",
    "Quantize a model, check the result, report each step.",
    """Quantize MODEL with real samples, check the result against it, and report each step.

    Without --data the ranges come from made-up inputs: good for trying things out, not for use.

    \b
    Examples:
      onnxq quantize model.onnx --data samples.npz
      onnxq quantize model.onnx --data images/ --config my.yaml -o small.onnx
      onnxq quantize model.onnx --data samples.npz --min-sqnr 25
      onnxq quantize model.onnx --config ort-int8-weights
      onnxq quantize model.onnx --config ort-dynamic
    """,
    [
        _MODEL,
        DATA,
        make_output("The quantized model. [default: MODEL.q.onnx beside MODEL]"),
        FORCE,
        STRICT,
        JSON,
        VERBOSE,
        QUIET,
    ],
    function="quantize:quantize",
    progress="quantizing {model}",
    takes="QUANTIZE",
    ending=".q.onnx",
)
VARIANTS = ModelCommand(
    "variants",
    "Make the float16, int8 and 4-bit files of a model for a hub.",
    """Make float16, int8 and 4-bit files of MODEL, named as transformers.js looks for them, and check each.

    The table says size, time on this machine and SQNR against float. Files whose answers are lost are left out; so are
    those that cannot be made, with the reason. A JSON file beside them says how each was made.

    Exits with 1 when not one can be used.

    \b
    Examples:
      onnxq variants model.onnx --data samples.npz -o my-model
      onnxq variants model.onnx --only q8,q4f16
      onnxq variants model.onnx --data samples.npz --metric evaluate.py:accuracy --max-drop 1%
    """,
    [
        _MODEL,
        DATA,
        make_output("Gets the folder onnx with the files. [default: MODEL-variants beside MODEL]", metavar="FOLDER"),
        FORCE,
        JSON,
        QUIET,
    ],
    function="variants.make:variants",
    progress="making variants of {model}",
    takes="VARIANTS",
    ending="-variants",
)
PLAN = ModelCommand(
    "plan",
    "Show the tensors that would be quantized, how and why; a dry run.",
    """Show the tensors of MODEL that would be quantized, how and by which rule, and the nodes that would stay float.

    A dry run: nothing is calibrated and no model is written. --json prints the plan itself.

    \b
    Examples:
      onnxq plan model.onnx
      onnxq plan model.onnx --config my.yaml -o plan.json
    """,
    [
        _MODEL,
        DATA,
        make_output("Write the plan, to edit it or to `onnxq apply` it.", metavar="OUT.json"),
        FORCE,
        JSON,
        VERBOSE,
        TOP,
        QUIET,
    ],
    function="plan:make_plan",
    progress="planning {model}",
    takes="PLAN",
)
APPLY = ModelCommand(
    "apply",
    "Carry out a plan on its model or on a re-export of it.",
    """Carry out PLAN on MODEL: the model it was made for, or the same network exported again.

    A plan with numbers needs no data, but is checked on it when given; a plan without is calibrated on --data.
    """,
    [
        _MODEL,
        click.Argument(["plan"]),
        DATA,
        make_output("The quantized model. [default: MODEL.q.onnx beside MODEL]"),
        FORCE,
        STRICT,
        JSON,
        VERBOSE,
        QUIET,
    ],
    function="apply:apply",
    progress="applying {plan} to {model}",
    takes="APPLY",
    ending=".q.onnx",
)
PROVE = ModelCommand(
    "prove",
    "Build the engine and tell which kernels run in int8.",
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
    """,
    [
        _MODEL,
        DATA,
        make_output("Keep the engine, the log, the list of kernels, the timing cache.", "--save", metavar="FOLDER"),
        FORCE,
        JSON,
        VERBOSE,
        TOP,
        QUIET,
    ],
    function="prove:prove",
    progress="proving {model}",
    takes="PROVE",
)
BENCH = ModelCommand(
    "bench",
    "Time models side by side on an engine, and count their kernels.",
    """Build every MODEL for an engine, list its kernels by type, and time all of them side by side.

    The models are of one network: float32, float16, quantized by whatever tool; the first is the one that others are
    compared with. TensorRT's engines are timed by events of the GPU, launched kernel by kernel and as a CUDA graph;
    without a GPU, TensorRT for RTX builds ahead of time, and the kernels are listed alone.

    Exits with 1 when a model cannot be built.

    \b
    Examples:
      onnxq bench model.onnx model.q.onnx
      onnxq bench model.onnx model.fp16.onnx model.q.onnx --engine tensorrt --batch 32 --json
    """,
    [_MODELS, DATA, JSON, VERBOSE, QUIET],
    function="bench:bench",
    progress="timing {count} models",
    takes="BENCH",
)
PERPLEXITY = ModelCommand(
    "perplexity",
    "Compare language models on a text: perplexity, agreement, tokens a second.",
    """Run language models on a text, and compare all with the first: perplexity, bits a byte, the share of positions
    with the same likeliest token, the divergence of their distributions, and texts generated greedily.

    The models are decoders of one vocabulary, with caches of keys and values or without. Tokens a second are those of a
    prompt and of generation behind half a window, timed side by side. The text is read in windows, one behind the
    other; of a long text --samples takes so many, spread over it.

    \b
    Examples:
      onnxq perplexity model.onnx model.q.onnx --data text.txt --tokenizer folder
      onnxq perplexity *.onnx --data text.txt --tokenizer bytes --samples 200 --generate 0 --json
    """,
    [_MODELS, click.Option(["--data"], metavar="TEXT", required=True, help="A text file, in UTF-8."), JSON, QUIET],
    function="perplexity:perplexity",
    progress="running {count} models",
    takes="PERPLEXITY",
)
DIFF = ModelCommand(
    "diff",
    "Compare a quantized model with its float one, and engines with each other.",
    """Run FLOAT and QUANT on samples and say how far they are apart: ONNX Runtime off, on, and TensorRT.

    Exits with 1 when a tolerance is not met, or when an engine that must run does not: one named by --engines, else the
    one that QUANT was made for, TensorRT only where it is installed and has a GPU.

    \b
    Examples:
      onnxq diff model.onnx model.q.onnx --data samples.npz --min-sqnr 20
      onnxq diff model.onnx model.q.onnx --data samples.npz --layers --bisect --save out
      onnxq diff model.onnx model.q.onnx --load from-the-gpu-machine/results.json
    """,
    [
        click.Argument(["model"], metavar="FLOAT"),
        click.Argument(["quantized"], metavar="QUANT"),
        DATA,
        make_output(
            "Write results.json and inputs.json (Polygraphy's), diff.json, pieces.", "--save", metavar="FOLDER"
        ),
        FORCE,
        JSON,
        VERBOSE,
        TOP,
        QUIET,
    ],
    function="diff:diff",
    progress="comparing {quantized} with {model}",
    takes="DIFF",
)
PROFILE = ModelCommand(
    "profile",
    "Measure the cost of each quantized site at the outputs.",
    """Switch quantized sites on and off, and measure their cost at the outputs of FLOAT, worst first.

    QUANT is a Q/DQ model made from FLOAT, by any tool. Without it, and without --plan, FLOAT is quantized in memory
    first. Each group is measured isolated (only it quantized) and left out (all but it), on 8 samples or --samples.

    \b
    Examples:
      onnxq profile model.onnx --data samples.npz
      onnxq profile model.onnx model.q.onnx --data samples.npz --by node
      onnxq profile model.onnx --plan plan.json --data samples.npz --json
    """,
    [
        click.Argument(["model"], metavar="FLOAT"),
        click.Argument(["quantized"], metavar="[QUANT]", required=False),
        click.Option(["--plan"], metavar="PLAN.json", help="A plan with its numbers, in the place of QUANT."),
        DATA,
        JSON,
        VERBOSE,
        TOP,
        QUIET,
    ],
    function="profile:profile_model",
    progress="profiling {subject}",
    takes="PROFILE",
)
REPORT = ModelCommand(
    "report",
    "Show on one page where the error is, what runs each operator, and what to do.",
    """Write one HTML page about QUANT beside FLOAT: the noise of every operator and the kernel that ran it, all
    quantized tensors with their ranges, and rules to paste for those that hurt. It loads nothing from a network, and
    holds the figures themselves.

    QUANT is a Q/DQ model made from FLOAT, by any tool. Without it FLOAT is quantized in memory first. --from shows a
    page again that was written before.

    \b
    Examples:
      onnxq report model.onnx model.q.onnx --data samples.npz -o report.html
      onnxq report model.onnx --data samples.npz -o report.html --markdown summary.md
      onnxq report --from report.html --mermaid graph.mmd
    """,
    [
        click.Argument(["model"], metavar="[FLOAT]", required=False),
        click.Argument(["quantized"], metavar="[QUANT]", required=False),
        click.Option(["--from", "record"], metavar="PAGE", help="A page or JSON written before, in the place of both."),
        DATA,
        make_output("The page.", metavar="OUT.html"),
        FORCE,
        JSON,
        QUIET,
    ],
    function="report:make_report",
    progress="measuring {subject}",
    takes="REPORT",
)
COMPARE = ModelCommand(
    "compare",
    "List what differs between two quantized models.",
    """List what differs between BEFORE and AFTER: tensors that are quantized in one alone or otherwise, and error, size
    and time as far as both tell them. Each is a page of `onnxq report`, a model of any tool, or a plan.

    Exits with 1 when a condition of --fail-if holds for AFTER.

    \b
    Examples:
      onnxq compare before.html after.html --fail-if "sqnr_db<30"
      onnxq compare ours.onnx theirs.onnx
    """,
    [
        click.Argument(["before"]),
        click.Argument(["after"]),
        click.Option(
            ["--fail-if", "fail_if"],
            multiple=True,
            metavar="FIGURE<NUMBER",
            help="A condition on a figure of AFTER: sqnr_db, bytes, speed, sites …; repeatable.",
        ),
        JSON,
        VERBOSE,
        TOP,
        QUIET,
    ],
    function="compare:compare",
    progress="comparing {after} with {before}",
)
CALIBRATE = ModelCommand(
    "calibrate",
    "Observe one shard of the samples, in a batch system.",
    """Observe MODEL's activations on a shard of the samples, for batch systems without a common scheduler.

    Every job gets all samples and the same options, which are those of `onnxq quantize`, and runs its shard alone.
    `onnxq merge` joins the parts; `onnxq quantize --ranges` takes them in place of runs of its own.

    \b
    Examples:
      onnxq calibrate model.onnx --data samples/ --shard 1/8 -o part1.json
      onnxq merge part*.json -o ranges.json
      onnxq quantize model.onnx --data samples/ --ranges ranges.json
    """,
    [
        _MODEL,
        DATA,
        click.Option(
            ["--shard"], default="1/1", metavar="I/N", help="Run the I-th of N shards of the samples. [default: 1/1]"
        ),
        make_output("The part. [default: MODEL.part.json beside MODEL]", metavar="PART.json"),
        FORCE,
        JSON,
        QUIET,
    ],
    function="shards:run_shard",
    progress="calibrating {model}",
    takes="QUANTIZE",
    ending=".part.json",
)
MERGE = ModelCommand(
    "merge",
    "Join the shards' ranges, for `quantize --ranges`.",
    """Join parts that `onnxq calibrate` wrote, in any order, for `onnxq quantize --ranges`.

    Parts of another model, configuration, data set or version are refused by name, and so is a sample given twice.
    Merged files may be merged again.

    \b
    Example:
      onnxq merge part1.json part2.json part3.json -o ranges.json
    """,
    [
        click.Argument(["parts"], nargs=-1, required=True, metavar="PART.json..."),
        make_output("The merged ranges.", metavar="RANGES.json"),
        FORCE,
        JSON,
        QUIET,
    ],
    function="shards:run_merge",
)
IMPORT = ModelCommand(
    "import-calibration",
    "Turn a TensorRT calibration cache into a plan with its scales.",
    """Turn CACHE, the text file of a TensorRT INT8 calibrator, into a plan with its scales.

    For the move from TensorRT 10's implicit INT8 to the explicit Q/DQ of TensorRT 11. Activations take the scales of
    the cache bit for bit, weights get theirs from their values. Lines without a tensor and tensors without a line are
    listed; --data calibrates the latter.

    \b
    Examples:
      onnxq import-calibration model.cache --model model.onnx --apply model.q.onnx
      onnxq import-calibration model.cache --model model.onnx --data samples.npz -o plan.json
    """,
    [
        click.Argument(["cache"]),
        click.Option(
            ["--model"], required=True, metavar="MODEL", help="The ONNX file that TensorRT was calibrated with."
        ),
        DATA,
        make_output("Write the plan, for `onnxq apply`.", metavar="PLAN.json"),
        click.Option(["--apply", "applied"], metavar="OUT.onnx", help="Carry the plan out at once: the Q/DQ model."),
        FORCE,
        JSON,
        VERBOSE,
        QUIET,
    ],
    function="import_calibration:import_and_apply",
    progress="importing {cache}",
    takes="IMPORT",
)
INSPECT = ModelCommand(
    "inspect",
    "List the Q/DQ pairs of any model, with their bits.",
    """List every quantize/dequantize pair of MODEL: its site, bits and scale, and the origin of the bits.

    The model may come from any tool.
    """,
    [_MODEL, JSON, VERBOSE, TOP, QUIET],
    function="inspect:inspect",
    progress="inspecting {model}",
)
ANNOTATE = ModelCommand(
    "annotate-bits",
    "Write the bits of every Q/DQ pair into the model.",
    """Write the number of bits into every quantize/dequantize pair of MODEL, under the pair's name.

    Bits are read from onnxq's metadata, `bits` attributes, the integer type, Clip bounds or the values of a
    quantized weight, unless given by --bits or --plan.

    \b
    Example:
      onnxq annotate-bits model.qdq.onnx --bits '/encoder/*=4' --bits '*=8'
    """,
    [
        _MODEL,
        click.Option(
            ["--bits", "given"],
            type=Parsed(_parse_bits),
            multiple=True,
            metavar="PATTERN=N",
            help="Bits of the pairs whose site or node matches (glob or /regex/); repeat it, the first match wins.",
        ),
        click.Option(["--plan"], metavar="PLAN.json", help="Take the bits from this plan."),
        make_output("[default: MODEL.bits.onnx beside MODEL]"),
        FORCE,
        JSON,
        VERBOSE,
        QUIET,
    ],
    function="inspect:annotate_bits",
    progress="annotating {model}",
    takes="ANNOTATE",
    ending=".bits.onnx",
)
KERNELS = ModelCommand(
    "build-kernels",
    "Compile the kernels of the torch front end ahead of time.",
    """Compile the fake-quant kernels: for the CPU with the C++ compiler, for GPUs with nvcc, or else with NVRTC.

    They are compiled on first use anyway; this does it before, and for GPUs that are not in this machine.

    \b
    Examples:
      onnxq build-kernels
      onnxq build-kernels --arch 8.6 --arch 9.0
    """,
    [
        click.Option(
            ["--arch", "archs"],
            multiple=True,
            metavar="ARCH",
            help="GPU to compile for: sm_90 or 9.0; repeatable. [default: all that nvcc knows, from sm_75 on]",
        ),
        make_output(
            "Build into FOLDER, for machines of the same kind (x86-64-v3), not for this processor into your cache.",
            metavar="FOLDER",
        ),
        click.Option(["--force"], is_flag=True, help="Build again what is there."),
        JSON,
        QUIET,
    ],
    function="kernels:build",
    progress="building kernels",
)
EXPLAIN = click.Command(
    "explain",
    short_help="Explain a code such as Q303, and its fix.",
    help="""Explain CODE, of an error, a refusal or a warning, and its fix; without it, list all codes.

    \b
    Example:
      onnxq explain Q303
    """,
    params=[click.Argument(["code"], required=False), JSON],
    callback=_explain,
)


@click.group(
    cls=CommandGroup,
    # In the order of a newcomer's steps.
    commands=[
        QUANTIZE,
        VARIANTS,
        PLAN,
        APPLY,
        PROVE,
        BENCH,
        PERPLEXITY,
        DIFF,
        PROFILE,
        REPORT,
        COMPARE,
        CALIBRATE,
        MERGE,
        IMPORT,
        INSPECT,
        ANNOTATE,
        KERNELS,
        EXPLAIN,
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
@click.version_option(package_name="onnxq", prog_name="onnxq")
def cli() -> None:
    """Quantize ONNX models after training: smaller, faster, and checked.

    \b
    Start with:
      onnxq quantize model.onnx --data samples.npz
    """


def main() -> None:
    """Entry point of the `onnxq` script; ends the process with one of the documented exit codes."""
    cli.main(prog_name="onnxq")
