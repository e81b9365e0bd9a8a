"""Options that several commands share, and types of option values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import click

# Bytes of each unit of memory; "Ki" and its like count by 1024.
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

# Bytes, or seconds, more than anybody has.
_LARGEST = 2.0**62


class FiniteFloat(click.FloatRange):
    """A finite number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Fails, naming the option and its value, for NaN and infinity."""
        # The bounds alone let NaN pass, since every comparison with it is false.
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found


def parse_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """The bytes of an amount of memory: 512MB, 2GB, 1.5GiB, or a number of bytes."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]?I?)B?", value.strip().upper())
    amount = float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else 0.0
    if not 1 <= amount < _LARGEST:
        raise click.BadParameter(f"{value!r} is no amount of memory; write it as 512MB, 2GB or 1.5GiB")
    return int(amount)


def join_options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator for several options, which --help lists in this order."""

    def decorate(command: Any) -> Any:
        # The decorator nearest to the function comes first, so the last is applied first.
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


# The configuration, and fields of it.
config_options = join_options(
    click.option(
        "--target",
        type=click.Choice(["ort", "trt", "virtual"]),
        help="The engine that will run the result; virtual: none. [default: ort]",
    ),
    click.option("--config", metavar="PRESET|FILE", help="A preset's name or a YAML file. [default: TARGET-int8]"),
    click.option(
        "--placement",
        type=click.Choice(["rules", "measured"]),
        help="rules: the same graph on every machine. measured: time a handful of placements here, take the fastest.",
    ),
    click.option(
        "--cpu",
        type=click.Choice(["any", "vnni", "avx2"]),
        help="The CPUs that target ort places for; any: one graph for those with and without VNNI. [default: any]",
    ),
)

data = join_options(
    click.option(
        "--data",
        metavar="DATA",
        help="Samples: .npz, a folder of .npy, .npz or images, test_data_set_*, Polygraphy data, file.py:function.",
    ),
    click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Use at most so many samples."),
    click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed of every random choice. [default: 0]"),
)

effort = click.option(
    "--effort",
    type=click.Choice(["fast", "balanced", "high"]),
    help="Time spent on accuracy. fast: ranges only; balanced, high: rewrite channels and weights. [default: balanced]",
)


def parse_seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """The seconds of a time: 90, 90s, 10m, 1.5h."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([smh]?)", value.strip().lower())
    amount = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not 0 < amount < _LARGEST:
        raise click.BadParameter(f"{value!r} is no time; write it as 90s, 10m or 1.5h")
    return amount


# Requirements that the result must meet.
accuracy_options = join_options(
    click.option(
        "--min-sqnr", type=FiniteFloat(), metavar="DB", help="Promote sites until every output keeps so many dB."
    ),
    click.option(
        "--metric", metavar="FILE.py:FUNCTION", help="Promote sites until this metric, higher is better, drops no more…"
    ),
    click.option("--max-drop", metavar="X", help="…than this: 0.01, or 1% of the float model's. [default: 0]"),
    click.option(
        "--promote-to",
        type=click.Choice(["float", "uint16"]),
        help="Type of promoted sites: float, or uint16 activations. [default: float]",
    ),
    click.option(
        "--weight-bits-budget",
        type=FiniteFloat(2, 16),
        metavar="BITS",
        help="Bits that weights may have on average; those get more than the configuration's that need them.",
    ),
    click.option(
        "--budget",
        metavar="TIME",
        callback=parse_seconds,
        help="Wall-clock time to keep to, e.g. 90s or 10m; passes get less.",
    ),
)

library = click.option(
    "--ort-library",
    multiple=True,
    metavar="FILE.so",
    help="A shared library with custom operators of the model, for ONNX Runtime; repeatable.",
)

plugin = click.option(
    "--plugin", multiple=True, metavar="FILE.so", help="A shared library with plugins, for TensorRT; repeatable."
)

provider = click.option(
    "--provider",
    metavar="NAME",
    help="Execution provider of ONNX Runtime for calibration and checks: cuda, tensorrt, openvino … [default: cpu]",
)

running = join_options(
    click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Samples in one run."),
    click.option(
        "--memory-limit",
        metavar="SIZE",
        callback=parse_size,
        help="Bound on the tensors kept of one run, e.g. 512MB or 2GB.",
    ),
)

checking = join_options(
    click.option(
        "--holdout",
        type=click.IntRange(min=0),
        metavar="N",
        help="Samples kept from calibration to check the result with.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=0),
        metavar="N",
        help="Threads for checking and timing; 0: all. [default: 1]",
    ),
    click.option("--no-latency", is_flag=True, help="Do not time float and quantized model."),
)

writing = join_options(
    click.option("--emit-bits-attribute", "bits_attribute", is_flag=True,
                 help="Also write the attribute `bits` on Q/DQ nodes; ONNX Runtime and onnx.checker refuse the file."),
    click.option("--external-data", is_flag=True, help="Write the weights to a file of their own beside the model."),
    click.option("--force", is_flag=True, help="Overwrite existing output files. The input is never overwritten."),
    click.option("--strict", is_flag=True, help="Exit with 3 when something asked for was refused."),
)  # fmt: skip

showing = join_options(
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
    click.option("--verbose", "-v", is_flag=True, help="List every site and every refusal."),
)

top = click.option(
    "--top", type=click.IntRange(min=1), metavar="N", help="Show no more than N rows of each list, the worst or first."
)

quiet = click.option("--quiet", "-q", is_flag=True, help="Print only warnings and errors.")
