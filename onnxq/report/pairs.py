"""The tables of `inspect` and `annotate-bits`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from onnxq.report.columns import Text
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.precision import format_precision
from onnxq.report.sums import make_sums_tables, saturation_summary
from onnxq.report.terminal import View, format_scale, format_warning, make_table, select_rows, show_result
from onnxq.spec import GRAIN_NAMES, PerBlock, PerChannel

if TYPE_CHECKING:
    from onnxq.annotate import Inspection, PairInfo


def show_inspection(found: Inspection, view: View = View()) -> None:
    """Print the pairs of a model. verbose: add role, type and node names."""
    warnings = map(format_warning, found.warnings)
    show_result(view, lambda: inspection_json(found), _make_parts(found, view), warnings)


def inspection_json(found: Inspection) -> str:
    """Convert the inspection to one JSON document."""
    return to_json(
        {
            "schema": SCHEMA,
            "source": found.source,
            "output": found.output,
            "warnings": found.warnings,
            "pairs": [_to_plain_pair(pair) for pair in found.pairs],
            "operators": found.operators,
            "weights": found.weights,
            "float_types": found.float_types,
        }
    )


def _to_plain_pair(pair: PairInfo) -> dict[str, Any]:
    grain = pair.granularity
    return {
        "site": str(pair.site),
        "scope": pair.scope,
        "role": pair.role,
        "ops": pair.ops,
        "bits": pair.bits,
        "origin": pair.origin,
        "type": pair.storage,
        "scheme": pair.scheme,
        "granularity": GRAIN_NAMES[type(grain)],
        **({"axis": grain.axis} if isinstance(grain, (PerChannel, PerBlock)) else {}),
        **({"block_size": grain.size} if isinstance(grain, PerBlock) else {}),
        "scales": pair.scales,
        "scale_min": pair.scale_min,
        "scale_max": pair.scale_max,
        "quantize": pair.quantize,
        "dequantize": pair.dequantize,
        "clip": pair.clip,
    }


def _make_parts(found: Inspection, view: View) -> Iterator[RenderableType]:
    if not found.pairs:
        yield Text(f"{found.source or 'the model'} holds no quantize/dequantize pair")
    else:
        pairs, more = select_rows(found.pairs, view)
        yield _make_table(pairs, view.verbose)
        if more:
            yield Text(more, style="dim")
        yield Text("")
        yield Text(_count_widths(found))
    if found.float_types is not None:
        yield Text("", *format_precision(found.float_types, view.verbose))
    if found.operators:
        yield Text("")
        yield _make_operators(found)
        yield Text("")
        count = len(found.operators)
        yield Text(f"{count} operator{'s' if count != 1 else ''} on integers: {_count_operators(found)}")
    tables = list(make_sums_tables(found.weights, None, view))
    if tables:
        yield Text("")
        yield from tables
    summary = saturation_summary(found.weights)
    if summary:
        yield Text(summary, style="yellow")
    if found.output:
        yield Text(f"written: {found.output}")


def _make_table(pairs: Sequence[PairInfo], verbose: bool) -> RenderableType:
    more = ("role", "type", "nodes") if verbose else ()
    columns = ("site", "op", "bits", "scheme", "granularity", "scale", "origin", *more)
    rows = (_make_row(pair, verbose) for pair in pairs)
    return make_table(columns, rows, right=("bits",), names=("site",), fold=("op", "granularity", "origin", "nodes"))


def _make_row(pair: PairInfo, verbose: bool) -> tuple[str, ...]:
    grain = pair.granularity
    where = GRAIN_NAMES[type(grain)]
    if isinstance(grain, PerBlock):
        where = f"block {grain.size}@{grain.axis}"
    elif isinstance(grain, PerChannel):
        where = f"channel {grain.axis}"
    # Scales that the model computes itself have no value in the file.
    scale = "at run time" if math.isnan(pair.scale_min) else format_scale(pair.scale_min, pair.scale_max)
    row = (str(pair.site), ",".join(pair.ops), str(pair.bits), pair.scheme, where, scale, str(pair.origin))
    return (*row, str(pair.role), pair.storage, " ".join(pair.nodes)) if verbose else row


def _make_operators(found: Inspection) -> RenderableType:
    rows = ((one.node, one.op, str(one.bits) if one.bits else "?", ", ".join(one.types)) for one in found.operators)
    return make_table(("node", "operator", "bits", "types"), rows, names=("node",), fold=("types",))


def _count_operators(found: Inspection) -> str:
    counted = Counter(one.op for one in found.operators)
    return ", ".join(f"{count} {op}" for op, count in sorted(counted.items()))


def _count_widths(found: Inspection) -> str:
    widths = Counter(pair.bits for pair in found.pairs)
    parts = ", ".join(f"{count} of {bits} bits" for bits, count in sorted(widths.items()))
    return f"{len(found.pairs)} pair{'s' if len(found.pairs) != 1 else ''}: {parts}"
