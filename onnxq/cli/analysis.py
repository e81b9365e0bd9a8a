"""The commands that look at models: options and help of each, as in `commands`."""

import click

from onnxq.cli.group import ModelCommand
from onnxq.cli.options import DATA, FORCE, TOP, VERBOSE, define_option, make_output

# Parameters hold no state, so that commands can share them.
MODEL = click.Argument(["model"])
MODELS = click.Argument(["models"], metavar="MODEL...", nargs=-1, required=True)

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
        MODEL,
        DATA,
        make_output(
            "Keep the engine, the log, the list of kernels, the timing cache.",
            "--save",
            metavar="FOLDER",
        ),
        FORCE,
        VERBOSE,
        TOP,
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
    without a GPU, TensorRT for RTX builds ahead of time, and the kernels are listed alone, as those of an NPU are.

    Exits with 1 when a model cannot be built.

    \b
    Examples:
      onnxq bench model.onnx model.q.onnx
      onnxq bench model.onnx model.fp16.onnx model.q.onnx --engine tensorrt --batch 32 --json
    """,
    [MODELS, DATA, VERBOSE],
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
    [
        MODELS,
        define_option("--data", "A text file, in UTF-8.", metavar="TEXT", required=True),
    ],
    function="perplexity:perplexity",
    progress="running {count} models",
    takes="PERPLEXITY",
)
DIFF = ModelCommand(
    "diff",
    "Compare a quantized model with its float one, and engines with each other.",
    """Run FLOAT and QUANT on samples and say how far they are apart: on ONNX Runtime without and with optimizations,
    and on the other engines that can run here.

    Exits with 1 when a tolerance is not met, or when an engine that must run does not: one named by --engines, else the
    one that QUANT was made for.

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
            "Write results.json and inputs.json (Polygraphy's), diff.json, pieces.",
            "--save",
            metavar="FOLDER",
        ),
        FORCE,
        VERBOSE,
        TOP,
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
        define_option(
            "--plan", "A plan with its numbers, in the place of QUANT.", metavar="PLAN.json"
        ),
        DATA,
        VERBOSE,
        TOP,
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
        define_option(
            "--from record", "A page or JSON written before, in the place of both.", metavar="PAGE"
        ),
        DATA,
        make_output("The page.", metavar="OUT.html"),
        FORCE,
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
        define_option(
            "--fail-if fail_if",
            "A condition on a figure of AFTER: sqnr_db, bytes, speed, sites …; repeatable.",
            multiple=True,
            metavar="FIGURE<NUMBER",
        ),
        VERBOSE,
        TOP,
    ],
    function="compare:compare",
    progress="comparing {after} with {before}",
)
INSPECT = ModelCommand(
    "inspect",
    "List the Q/DQ pairs of any model, with their bits.",
    """List every quantize/dequantize pair of MODEL: its site, bits and scale, and the origin of the bits.

    The model may come from any tool.
    """,
    [MODEL, VERBOSE, TOP],
    function="inspect:inspect",
    progress="inspecting {model}",
)
# In the order of a newcomer's steps.
ANALYSES = (PROVE, BENCH, PERPLEXITY, DIFF, PROFILE, REPORT, COMPARE)
