"""Sections of the configuration that serve one command each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, PlainValidator

from onnxq.config.presets import DEFAULT_TARGET
from onnxq.config.values import Command, File, Files, Seconds, Section, Words, option, split_words, wrap_pairs

# Names of `onnxq.backends`, which knows whether there are any.
_Engines = Annotated[tuple[str, ...], BeforeValidator(split_words)]
# (type, pattern) of nodes that must run in the type.
_Pairs = Annotated[tuple[tuple[str, str], ...], BeforeValidator(wrap_pairs)]
_Dtypes = Annotated[tuple[Literal["fp16", "int8", "q8", "q4", "q4f16"], ...], BeforeValidator(split_words)]
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

    commands: ClassVar[Command] = Command.QUANTIZE
    min_sqnr: float | None = option(None, "Promote sites until every output keeps so many dB.", metavar="DB")
    # A file.py:function, or a function, of a `MetricModel`.
    metric: _Metric | None = option(
        None, "Promote sites until this metric, higher is better, drops no more…", metavar="FILE.py:FUNCTION", code=True
    )
    max_drop: _Drop | None = option(None, "…than this: 0.01, or 1% of the float model's. [default: 0]", metavar="X")
    promote_to: Literal["float", "uint16"] = option("float", "Type of promoted sites: float, or uint16 activations.")


class ApplyConfig(Section):
    """Options of `apply`, which carries out a plan."""

    commands: ClassVar[Command] = Command.APPLY
    new_weights: bool = option(False, "The weights were trained further: compute their scales again.")


class DiffConfig(Section):
    """Options of `diff`, which compares a quantized model with its float one in several engines."""

    commands: ClassVar[Command] = Command.DIFF
    # (): ONNX Runtime, and TensorRT where it can run.
    engines: _Engines = option(
        (), "Engines that must run. [default: ort, and trt where it can]", metavar="ENGINE,…", names="runnable"
    )
    layers: bool = option(False, "Compare every matching tensor inside, in the order of the network.")
    bisect: bool = option(False, "Find the smallest subgraph in which engines diverge.")
    min_sqnr: float | None = option(None, "Least SQNR of every output against float.", metavar="DB")
    min_cosine: float | None = option(None, "Least cosine similarity of every output with float.", metavar="C")
    max_abs: float | None = option(None, "Largest absolute error of every output against float.", metavar="X")
    top_k: int = option(
        1, "Agreement: the share of the K largest along the last axis that both name.", metavar="K", ge=1
    )
    min_agreement: float | None = option(None, "Least agreement, 0 to 1.", metavar="P", ge=0, le=1)
    min_engines: float | None = option(
        None, "Least SQNR of every engine against ONNX Runtime without optimizations.", metavar="DB"
    )
    keep: int = option(16, "Samples whose inputs and outputs are saved.", ge=1)
    load: Files = option(
        (), "Also compare results saved elsewhere, by this command or `polygraphy run --save-outputs`; repeatable.",
        metavar="RESULTS.json",
    )  # fmt: skip


class ProveConfig(Section):
    """Options of `prove`, which builds an engine and reads its kernels."""

    commands: ClassVar[Command] = Command.PROVE
    # None: the one that the plan in the model is for.
    engine: str | None = option(
        None, "tensorrt-rtx builds without a GPU, tensorrt for the one in this machine, ort for this CPU. [default: "
        "the one that the plan in MODEL is for; tensorrt-rtx where it holds none]",
        metavar="ENGINE", names="engines",
    )  # fmt: skip
    compute_capability: str | None = option(None, "GPU to build for, tensorrt-rtx only. [default: 8.6]", metavar="8.6")
    require: _Pairs = option(
        (), "Nodes (glob, /regular expression/, or an operator) that must run in a type: int8 'Conv*'; quantized '*': "
        "products run as their pairs say; repeatable.",
        metavar="TYPE PATTERN",
    )  # fmt: skip
    require_int8: Words = option((), "The same for int8; repeatable.", metavar="PATTERN")
    forbid: Words = option(
        (), "No product (Conv, Gemm, MatMul, LSTM, …) may compute in it, e.g. float32; repeatable.", metavar="TYPE"
    )
    # The engine of the default target has its name.
    require_exact: bool = option(
        False, f"No weight may overflow 16-bit sums on CPUs without VNNI; `engine='{DEFAULT_TARGET}'` only."
    )
    # Decibels and shares settle within few samples.
    samples: int = option(8, "Count saturating sums on at most so many samples.", ge=1)
    threads: int = option(0, "Threads for that; 0: all.", ge=0)
    shapes: Words = option(
        (), "Sizes of an input of no fixed size, e.g. x:1x3x224x224,4x3x224x224,8x3x224x224; repeatable.",
        metavar="INPUT:MIN,OPT,MAX",
    )  # fmt: skip
    # A path; "": none.
    compare: File = option("", "List the changes since the JSON of an earlier proof.", metavar="PREVIOUS.json")
    reduce: bool = option(False, "When the build fails or crashes, find the smallest part that does.")
    timeout: Seconds = option(600.0, "Time a build may take.", metavar="SECONDS")


class ProfileConfig(Section):
    """Options of `profile`, which measures the cost of sites."""

    commands: ClassVar[Command] = Command.PROFILE
    by: _Groups = option(
        (),
        "Sites to switch together: all that a node reads, neighbouring nodes, each site. [default: all three]",
        metavar="node,segment,site",
    )
    # A cost is a matter of decibels, which few samples settle.
    samples: int = option(8, "Measure on at most so many samples.", ge=1)


class BenchConfig(Section):
    """Options of `bench`, which times models on an engine."""

    commands: ClassVar[Command] = Command.BENCH
    # None: the one that the first plan in the models is for.
    engine: str | None = option(
        None, "tensorrt and tensorrt-rtx on the GPU of this machine, ort on the CPU or a provider. [default: the one "
        "that the first plan in the models is for]",
        metavar="ENGINE", names="engines",
    )  # fmt: skip
    compute_capability: str | None = option(
        None, "GPU to build for, tensorrt-rtx only; kernels are counted and nothing is timed.", metavar="8.6"
    )
    shapes: Words = option(
        (), "Sizes of an input of no fixed size, e.g. x:1x3x224x224; repeatable.", metavar="INPUT:SIZES"
    )
    batch: int = option(1, "Samples in a run.", ge=1)
    seconds: Seconds = option(10.0, "Time to spend on timing, in all.", metavar="SECONDS")
    timeout: Seconds = option(600.0, "Time a build may take.", metavar="SECONDS")


class PerplexityConfig(Section):
    """Options of `perplexity`, which compares language models on a text."""

    commands: ClassVar[Command] = Command.PERPLEXITY
    generate: int = option(50, "Tokens to generate after each of the prompts; 0: none.", ge=0)
    prompts: int = option(8, "Prompts to generate after: first halves of windows.", ge=1)


class VariantsConfig(Section):
    """Options of `variants`, which makes the files of a model that hubs hold."""

    commands: ClassVar[Command] = Command.VARIANTS
    # (): all.
    only: _Dtypes = option((), "Make no others. [default: all]", metavar="fp16,int8,q8,q4,q4f16")
    # "": that of the model.
    name: str = option("", "Name of the files in front of the suffix. [default: that of MODEL]", metavar="NAME")
    keep_broken: bool = option(False, "Also write files whose answers are lost.")
    metric: _Metric | None = option(
        None, "Also measure this metric, higher is better, of every file.", metavar="FILE.py:FUNCTION", code=True
    )
    max_drop: _Drop | None = option(
        None, "Answers are lost, too, where the metric drops more: 0.01, or 1% of the float model's.", metavar="X"
    )
