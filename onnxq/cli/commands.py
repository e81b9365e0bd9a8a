"""The commands of `onnxq`: arguments, options and help. Their options of the configuration are added when one is named,
their functions in `onnxq.commands` are imported when one runs."""

import gc

import click

from onnxq.cli.analysis import ANALYSES, INSPECT, MODEL
from onnxq.cli.group import CommandGroup, ModelCommand
from onnxq.cli.options import DATA, FORCE, JSON, STRICT, TOP, VERBOSE, define_option, make_output
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
# Parameters of the commands that make a quantized model.
_MAKING = (
    DATA,
    make_output("The quantized model. [default: MODEL.q.onnx beside MODEL]"),
    FORCE,
    STRICT,
    VERBOSE,
)
# The last parameters of commands that write another file.
_WRITING = (FORCE, VERBOSE)
# Digits of a number of bits; the widest integers have 64.
_DIGITS = 3


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
    [MODEL, *_MAKING],
    function="quantize:quantize",
    progress="quantizing {model}",
    takes="QUANTIZE",
    ending=".q.onnx",
)
SEARCH = ModelCommand(
    "search",
    "Find the best precision of each operator under limits.",
    """Choose the precision of each operator of MODEL, so that the file keeps limits on its size, its time and its
    accuracy: the most accurate file of a size or a time, or the smallest or fastest that is accurate enough.

    What each precision costs is measured alone, an integer programme chooses, and mixtures along the front are made and
    measured as whole models. The result is one of these; the table shows them all.

    \b
    Examples:
      onnxq search model.onnx --data samples.npz --max-size 3MB
      onnxq search model.onnx --data samples.npz --max-latency 5 --rules mixed.yaml
      onnxq search model.onnx --data samples.npz --metric evaluate.py:accuracy --max-drop 1%
      onnxq search model.onnx --data samples.npz --min-sqnr 25 --minimize latency --plot front.png
    """,
    [MODEL, *_MAKING],
    function="search:search",
    progress="searching precisions of {model}",
    takes="SEARCH",
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
        MODEL,
        DATA,
        make_output(
            "Gets the folder onnx with the files. [default: MODEL-variants beside MODEL]",
            metavar="FOLDER",
        ),
        FORCE,
    ],
    function="variants.make:variants",
    progress="making variants of {model}",
    takes="VARIANTS",
    ending="-variants",
)
CONVERT = ModelCommand(
    "convert",
    "Make a quantized file of any tool fit another engine.",
    """Take the pairs of MODEL, made by any tool, out and place those of another engine, with the same numbers.

    Integers of weights stay wherever the engine's form can hold them; ranges of activations stay, in the type that the
    engine reads. What the file has no range for is calibrated with --data, and else left float. What is rounded anew is
    said. --to float writes the float model, with the rounded weights.

    \b
    Examples:
      onnxq convert model.trt.onnx --to ort -o model.ort.onnx
      onnxq convert model.int8.onnx --to trt --data samples.npz
      onnxq convert model.int8.onnx --to float
    """,
    [
        MODEL,
        define_option("--to", "The engine, or `float`.", required=True, metavar="ort|trt|…|float"),
        DATA,
        make_output("The file. [default: MODEL.converted.onnx beside MODEL]"),
        FORCE,
        STRICT,
        VERBOSE,
    ],
    function="convert:convert",
    progress="converting {model}",
    takes="CONVERT",
    ending=".converted.onnx",
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
        MODEL,
        DATA,
        make_output("Write the plan, to edit it or to `onnxq apply` it.", metavar="OUT.json"),
        FORCE,
        VERBOSE,
        TOP,
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
    [MODEL, click.Argument(["plan"]), *_MAKING],
    function="apply:apply",
    progress="applying {plan} to {model}",
    takes="APPLY",
    ending=".q.onnx",
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
        MODEL,
        DATA,
        define_option(
            "--shard",
            "Run the I-th of N shards of the samples. [default: 1/1]",
            default="1/1",
            metavar="I/N",
        ),
        make_output("The part. [default: MODEL.part.json beside MODEL]", metavar="PART.json"),
        FORCE,
    ],
    function="shards:calibrate_part",
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
    ],
    function="shards:merge_parts",
)
IMPORT = ModelCommand(
    "import-calibration",
    "Turn another tool's file of scales into a plan.",
    """Turn CACHE, a file of scales of another tool, into a plan with those scales: a calibration cache or dynamic
    ranges of TensorRT, encodings of AIMET, TensorQuantOverrides of ONNX Runtime, a configuration of PPQ.

    Activations take the scales bit for bit, and so do weights where the file has some; their bits are those of the
    file wherever the target has a kernel. Lines without a tensor and tensors without a line are listed; --data
    calibrates the latter.

    \b
    Examples:
      onnxq import-calibration model.cache --model model.onnx --apply model.q.onnx
      onnxq import-calibration model.encodings --model model.onnx --target qnn -o plan.json
      onnxq import-calibration model.cache --model model.onnx --data samples.npz -o plan.json
    """,
    [
        click.Argument(["cache"]),
        define_option(
            "--model",
            "The ONNX file that the scales were found on.",
            required=True,
            metavar="MODEL",
        ),
        DATA,
        define_option(
            "--format kind", "Format of CACHE. [default: the one it looks like]", metavar="FORMAT"
        ),
        make_output("Write the plan, for `onnxq apply`.", metavar="PLAN.json"),
        define_option(
            "--apply applied", "Carry the plan out at once: the Q/DQ model.", metavar="OUT.onnx"
        ),
        *_WRITING,
    ],
    function="import_calibration:import_and_apply",
    progress="importing {cache}",
    takes="IMPORT",
)
EXPORT = ModelCommand(
    "export-calibration",
    "Write the scales of a plan or a quantized model for another tool.",
    """Write the scales of SOURCE, a plan or a quantized model of any tool, as a file that another tool reads.

    Sites that the format cannot hold are listed with the reason, and so are the float tensors without an entry: tools
    that read such a file calibrate them in silence. For a plan, --model names the network that is looked through.

    \b
    Examples:
      onnxq export-calibration model.q.onnx --format aimet-2.0 -o model.encodings
      onnxq export-calibration plan.json --model model.onnx --format tensor-quant-overrides -o overrides.json
    """,
    [
        click.Argument(["source"]),
        define_option(
            "--format kind",
            "aimet-0.6.1, aimet-1.0, aimet-2.0, aimet-2.1, tensorrt-cache, tensorrt-ranges or "
            "tensor-quant-overrides.",
            required=True,
            metavar="FORMAT",
        ),
        define_option("--model", "The network that a plan is for.", metavar="MODEL"),
        make_output("The file."),
        *_WRITING,
    ],
    function="export_calibration:export_calibration",
    progress="exporting {source}",
)
IMPORT_WEIGHTS = ModelCommand(
    "import-weights",
    "Put the codes of a GPTQ, AWQ, compressed-tensors or GGUF checkpoint in.",
    """Give MODEL, a float export, the quantized weights of CHECKPOINT, code for code.

    CHECKPOINT is a folder with safetensors in GPTQ, AWQ or compressed-tensors, or a .gguf file. Its weights are found
    in MODEL by their values, where that was exported from the dequantized checkpoint, or by their names.

    \b
    Examples:
      onnxq import-weights model.onnx Llama-GPTQ/ -o model.q4.onnx
      onnxq import-weights model.onnx model.Q4_0.gguf --emit qdq
    """,
    [MODEL, click.Argument(["checkpoint"]), *_MAKING],
    function="import_weights:import_weights",
    progress="importing {checkpoint} into {model}",
    takes="IMPORT_WEIGHTS",
    ending=".q.onnx",
)
ANNOTATE = ModelCommand(
    "annotate-bits",
    "Write the bits of every Q/DQ pair into the model.",
    """Write the number of bits into every quantize/dequantize pair of MODEL, under the pair's name.

    Bits are read from onnxq's metadata, `bits` attributes, the integer type, Clip bounds or the values of a
    quantized weight, unless given by --bits or --plan.

    \b
    Examples:
      onnxq annotate-bits model.qdq.onnx --bits '/encoder/*=4' --bits '*=8'
      onnxq annotate-bits model.qdq.onnx --check
      onnxq annotate-bits simplified.onnx --from model.bits.json
      onnxq annotate-bits model.qdq.onnx --bits 'act*=4' --emit clip-qdq
    """,
    [
        MODEL,
        define_option(
            "--bits given",
            "Bits of the pairs whose site or node matches (glob or /regex/); repeat it, the first match wins.",
            parse=_parse_bits,
            multiple=True,
            metavar="PATTERN=N",
        ),
        define_option("--plan", "Take the bits from this plan.", metavar="PLAN.json"),
        define_option(
            "--from beside", "Take the bits from notes beside a model.", metavar="NOTES.json"
        ),
        define_option("--sidecar", "Also write the notes beside the model.", metavar="OUT.json"),
        define_option(
            "--check", "Write nothing; exit with 1 where notes and numbers disagree.", is_flag=True
        ),
        define_option(
            "--strip", "Take all notes of bits out of the model, the plan too.", is_flag=True
        ),
        define_option(
            "--emit",
            "Rewrite the pairs in this form, so that the numbers follow the bits.",
            type=click.Choice(["clip-qdq", "qcdq", "native", "qonnx"]),
        ),
        make_output("The annotated model. [default: MODEL.bits.onnx beside MODEL]"),
        *_WRITING,
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
        define_option(
            "--arch archs",
            "GPU to compile for: sm_90 or 9.0; repeatable. [default: all that nvcc knows, from sm_75 on]",
            multiple=True,
            metavar="ARCH",
        ),
        make_output(
            "Build into FOLDER, for machines of the same kind (x86-64-v3), not for this processor into your cache.",
            metavar="FOLDER",
        ),
        define_option("--force", "Build again what is there.", is_flag=True),
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
        SEARCH,
        CONVERT,
        VARIANTS,
        PLAN,
        APPLY,
        *ANALYSES,
        CALIBRATE,
        MERGE,
        IMPORT,
        EXPORT,
        IMPORT_WEIGHTS,
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
    gc.set_threshold(20_000)  # objects; circles of garbage are half a second's search with 700
    cli.main(prog_name="onnxq")
