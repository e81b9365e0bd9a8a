"""Sections of the configuration that serve one command each."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator

from onnxq.config.values import (
    DEFAULT_TARGET,
    MAKING,
    Command,
    File,
    Files,
    Seconds,
    Section,
    Size,
    Words,
    join_words,
    option,
    split_words,
    wrap_pairs,
)

# Names of `onnxq.backends`, which knows whether there are any.
_Engines = Annotated[tuple[str, ...], BeforeValidator(split_words)]
# (type, pattern) of nodes that must run in the type.
_Pairs = Annotated[tuple[tuple[str, str], ...], BeforeValidator(wrap_pairs)]
_Dtypes = Annotated[
    tuple[Literal["fp16", "int8", "q8", "q4", "q4f16"], ...], BeforeValidator(split_words)
]
_Groups = Annotated[tuple[Literal["node", "segment", "site"], ...], BeforeValidator(split_words)]


def _check_metric(value: Any) -> Any:
    if not isinstance(value, str) and not callable(value):
        raise ValueError("must be file.py:function, or a function of a model")
    return value


def _check_drop(value: Any) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not isinstance(value, str) and not (number and abs(value) < math.inf):  # NaN is not below it
        raise ValueError("must be 0.01 (absolute) or 1% (of the float model's)")
    return value


_Metric = Annotated[str | Callable[[Any], float], PlainValidator(_check_metric)]
_Drop = Annotated[float | str, PlainValidator(_check_drop)]


class AccuracyConfig(Section):
    """The accuracy that a result must have. The costliest parts are promoted until it does."""

    commands = MAKING
    min_sqnr: float | None = option(
        None,
        "Least SQNR of every output against float, in dB; sites are promoted until it holds.",
        metavar="DB",
    )
    # A file.py:function, or a function, of a `MetricModel`.
    metric: _Metric | None = option(
        None,
        "A metric, higher is better; sites are promoted until it drops by `max_drop=…` at most.",
        metavar="FILE.py:FUNCTION",
        code=True,
    )
    max_drop: _Drop | None = option(
        None,
        "Largest drop of `metric=…`: absolute (0.01), or relative to the float model (1%). [default: 0]",
        metavar="X",
    )
    promote_to: Literal["float", "uint16"] = option(
        "float", "The type of promoted sites: float, or 16-bit activations.", Command.QUANTIZE
    )


class ApplyConfig(Section):
    """Options of `apply`, which carries out a plan."""

    commands = Command.APPLY
    new_weights: bool = option(
        False, "Compute the scales of the weights again, because the network was trained further."
    )


class ConvertConfig(Section):
    """Options of `convert`, which makes a quantized file fit another engine."""

    commands = Command.CONVERT
    kernels: bool = option(
        True,
        "Count the kernels of both files by type, as the target's engine builds them where it is installed.",
    )
    complete: bool = option(
        False,
        "Quantize what the file has in float, too, where the target's placement does, with ranges of samples.",
    )


class DiffConfig(Section):
    """Options of `diff`, which compares a quantized model with its float one in several engines."""

    commands = Command.DIFF
    # (): ONNX Runtime, and TensorRT where it can run.
    engines: _Engines = option(
        (),
        "Engines that must run. [default: ONNX Runtime, and the others where they can run]",
        metavar="ENGINE,…",
        names="runnable",
    )
    layers: bool = option(
        False, "Compare every tensor that both models have, in the order of the network."
    )
    bisect: bool = option(False, "Find the smallest subgraph in which the engines diverge.")
    min_sqnr: float | None = option(
        None, "Least SQNR of every output against float, in dB.", metavar="DB"
    )
    min_cosine: float | None = option(
        None, "Least cosine similarity of every output with float, -1 to 1.", metavar="C"
    )
    max_abs: float | None = option(
        None,
        "Largest absolute error of every output against float, in the output's unit.",
        metavar="X",
    )
    top_k: int = option(
        1,
        "K of the agreement: the share of the K largest values along the last axis that both models name.",
        metavar="K",
        ge=1,
    )
    min_agreement: float | None = option(
        None,
        "Least agreement of every output with float, 0 to 1 (see `top_k=…`).",
        metavar="P",
        ge=0,
        le=1,
    )
    min_engines: float | None = option(
        None,
        "Least SQNR of every engine against ONNX Runtime without optimizations, in dB.",
        metavar="DB",
    )
    keep: int = option(16, "Number of samples whose inputs and outputs are saved.", ge=1)
    load: Files = option(
        (),
        "Also compare results that this command or `polygraphy run --save-outputs` saved elsewhere; repeatable.",
        metavar="RESULTS.json",
    )


class ProveConfig(Section):
    """Options of `prove`, which builds an engine and reads its kernels."""

    commands = Command.PROVE
    # None: the one that the plan in the model is for.
    engine: str | None = option(
        None,
        "Engine to build with. [default: the engine of the plan in MODEL; if there is none, one that needs no GPU]",
        metavar="ENGINE",
        names="engines",
    )
    compute_capability: str | None = option(
        None,
        "Compute capability of the GPU to build for, or `current`; for an engine that needs none. [default: 8.6]",
        metavar="8.6",
    )
    require: _Pairs = option(
        (),
        "Nodes (a glob, /regular expression/ or operator) that must run in a type: int8, float8, float16, "
        "bfloat16, float32; int4, int2, uint4, uint2, float4 for weights; or `quantized`, as their pairs say; "
        "repeatable.",
        metavar="TYPE PATTERN",
    )
    require_int8: Words = option(
        (), "Nodes that must run in int8, as PATTERN of `require=…`; repeatable.", metavar="PATTERN"
    )
    forbid: Words = option(
        (),
        "A type, e.g. float32, in which no Conv, Gemm, MatMul, LSTM or other product may compute; repeatable.",
        metavar="TYPE",
    )
    require_int: bool = option(
        False,
        "Fail if a node is left to the CPU of an accelerator's machine, or computes on data that is not integer.",
    )
    max_partitions: int | None = option(
        None,
        "Fail if more parts of the model than this run on an accelerator, or none.",
        metavar="N",
        ge=1,
    )
    # The engine of the default target has its name.
    require_exact: bool = option(
        False,
        f"Fail if a weight can overflow 16-bit sums on CPUs without VNNI; `engine='{DEFAULT_TARGET}'` only.",
    )
    # Decibels and shares settle within few samples.
    samples: int = option(
        8, "Number of samples at most on which saturating sums are counted.", ge=1
    )
    threads: int = option(0, "Threads for counting saturating sums; 0: all cores.", ge=0)
    shapes: Words = option(
        (),
        "Sizes of a dynamic input, e.g. x:1x3x224x224,4x3x224x224,8x3x224x224, or one size for all; repeatable.",
        metavar="INPUT:MIN,OPT,MAX",
    )
    # A path; "": none.
    compare: File = option(
        "",
        "List the changes since an earlier proof, which `prove` wrote as JSON.",
        metavar="PREVIOUS.json",
    )
    reduce: bool = option(
        False, "If the build fails or crashes, find the smallest part of the model that does too."
    )
    timeout: Seconds = option(600.0, "Time limit of a build, in seconds.", metavar="SECONDS")


class ProfileConfig(Section):
    """Options of `profile`, which measures the cost of sites."""

    commands = Command.PROFILE
    by: _Groups = option(
        (),
        "Groups of sites to switch together: the inputs of a node, neighbouring nodes, single sites. [default: all]",
        metavar="node,segment,site",
    )
    # A cost is a matter of decibels, which few samples settle.
    samples: int = option(8, "Number of samples at most to measure on.", ge=1)


class SearchConfig(Section):
    """Options of `search`, which chooses a precision for each operator."""

    commands = Command.SEARCH
    max_size: Size | None = option(None, "Largest file, in bytes or as 512KB, 5MB.", metavar="SIZE")
    max_latency: float | None = option(
        None, "Longest time of one run on this machine, in milliseconds.", metavar="MS", gt=0
    )
    minimize: Literal["size", "latency"] = option(
        "size", "What is to be small where an accuracy is asked for."
    )
    # Separated by commas; "": see the help.
    precisions: Annotated[str, BeforeValidator(join_words)] = option(
        "",
        "Precisions to choose from, as the result names them: float,w8a8,w4a8. [default: all that the target has "
        "kernels for, and weights of fewer bits where they make the file smaller]",
        metavar="NAME,…",
    )
    points: int = option(
        6, "Number of mixtures, from cheap to accurate, that are made and measured.", ge=1, le=100
    )
    rules: File = option(
        "",
        "Also write the configuration that the result is made by, with a rule for each precision.",
        name="rules_out",
        metavar="OUT.yaml",
    )
    csv: File = option(
        "",
        "Also write the table of what was measured.",
        name="csv_out",
        metavar="OUT.csv",
    )
    plot: File = option(
        "",
        "Also draw what was measured; needs matplotlib.",
        name="plot_out",
        metavar="OUT.png",
    )


class ReportConfig(Section):
    """Options of `report`, which writes a page and other forms of it."""

    commands = Command.REPORT
    samples: int = option(4, "Number of samples at most to measure on.", ge=1)
    engine: str | None = option(
        None,
        "Engine whose kernels are shown. [default: the engine of the plan in QUANT; without one, ONNX Runtime]",
        metavar="ENGINE",
        names="engines",
    )
    markdown: File = option("", "Write a summary for a pull request.", metavar="OUT.md")
    mermaid: File = option("", "Write the operators as a Mermaid flowchart.", metavar="OUT.mmd")
    node_data: File = option(
        "",
        "Write Model Explorer's node data: the noise that each operator adds.",
        metavar="OUT.json",
    )
    graph: File = option(
        "", "Write a graph that Model Explorer opens without an adapter.", metavar="OUT.json"
    )


class BenchConfig(Section):
    """Options of `bench`, which times models on an engine."""

    commands = Command.BENCH
    # None: the one that the first plan in the models is for.
    engine: str | None = option(
        None,
        "Engine to time. ONNX Runtime also runs on `provider=…`. [default: the engine of the first plan in the models]",
        metavar="ENGINE",
        names="engines",
    )
    compute_capability: str | None = option(
        None,
        "Compute capability of the GPU to build for, without one; counts kernels and times nothing.",
        metavar="8.6",
    )
    shapes: Words = option(
        (), "Size of a dynamic input, e.g. x:1x3x224x224; repeatable.", metavar="INPUT:SIZES"
    )
    batch: int = option(1, "Number of samples in a run (batch size).", ge=1)
    seconds: Seconds = option(
        10.0, "Time to spend on timing all models, in seconds.", metavar="SECONDS"
    )
    timeout: Seconds = option(600.0, "Time limit of a build, in seconds.", metavar="SECONDS")


class PerplexityConfig(Section):
    """Options of `perplexity`, which compares language models on a text."""

    commands = Command.PERPLEXITY
    generate: int = option(50, "Number of tokens to generate after each prompt; 0: none.", ge=0)
    prompts: int = option(8, "Number of prompts, which are first halves of windows.", ge=1)


class VariantsConfig(Section):
    """Options of `variants`, which makes the files of a model that hubs hold."""

    commands = Command.VARIANTS
    # (): all.
    only: _Dtypes = option(
        (),
        "Variants to make: any of fp16, int8, q8, q4, q4f16. [default: all]",
        metavar="fp16,int8,q8,q4,q4f16",
    )
    # "": that of the model.
    name: str = option(
        "",
        "File name in front of each variant's suffix. [default: the name of MODEL]",
        metavar="NAME",
    )
    keep_broken: bool = option(
        False, "Also write variants whose outputs are broken or beyond `max_drop=…`."
    )
    metric: _Metric | None = option(
        None,
        "A metric, higher is better, to measure on every variant.",
        metavar="FILE.py:FUNCTION",
        code=True,
    )
    max_drop: _Drop | None = option(
        None,
        "Largest drop of `metric=…`, beyond which a variant is broken: absolute (0.01) or relative to float (1%).",
        metavar="X",
    )
