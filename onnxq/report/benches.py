"""Models timed side by side, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from onnxq.backends import find_engine
from onnxq.backends.engine import Untimed
from onnxq.engines.bench import Bench, BenchedModel
from onnxq.errors import VerificationError
from onnxq.report.columns import Text
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.terminal import (
    View,
    format_bytes,
    format_milliseconds,
    format_seconds,
    format_shapes,
    format_threads,
    format_warning,
    make_sheet,
    make_table,
    show_result,
)
from onnxq.runtime import CPU_KINDS, Latency

_UNTIMED = {
    Untimed.NO_GPU: "this machine has no NVIDIA GPU, or no driver: engines were built ahead of time for compute "
    "capability {capability}, and their kernels stand here alone",
    Untimed.OTHER_GPU: "engines were built for compute capability {capability}, whatever GPU this machine has",
    Untimed.NOT_BUILT: "no model was built",
}


def bench_json(found: Bench, error: Mapping[str, Any] | None = None) -> str:
    """Convert the comparison to one strict JSON document: times in milliseconds, kernels counted by kind and type."""
    return to_json(
        {
            "schema": SCHEMA,
            "error": error,
            "engine": found.engine,
            "version": found.version,
            "chosen": found.chosen,
            "device": found.device,
            "provider": found.provider,
            "untimed": found.untimed,
            "shapes": found.shapes,
            "data": found.data,
            "synthetic": found.synthetic,
            "models": [_describe_model(found, one) for one in found.models],
            "warnings": found.warnings,
        }
    )


def _describe_model(found: Bench, one: BenchedModel) -> dict[str, Any]:
    proof = one.proof
    return {
        "name": one.name,
        "build": None if proof is None else proof.build,
        "kernels": None if proof is None else len(proof.kernels),
        "moving": None if proof is None else len(proof.moving),
        "kinds": {} if proof is None else proof.by_kind(),
        "types": one.types,
        "eager": _describe_latency(one.eager),
        "graph": _describe_latency(one.graph),
        "ratio": found.ratio(one),
        "reason": one.reason,
    }


def _describe_latency(latency: Latency | None) -> dict[str, Any] | None:
    if latency is None:
        return None
    return {key: value for key, value in asdict(latency).items() if key != "times_ms"} | {
        "per_second": latency.per_second
    }


def show_bench(found: Bench, view: View = View(), *, error: Mapping[str, Any] | None = None) -> None:
    """Print the models as a table. verbose: also the kernels of each by kind. error: what the command fails with."""
    warnings = map(format_warning, found.warnings)
    show_result(view, lambda: bench_json(found, error), _make_parts(found, view.verbose), warnings)


def find_failed_model(found: Bench) -> VerificationError | None:
    """The error of the first model that was not built, or not timed where others were; None without one."""
    for one in found.failed:
        if one.proof is not None and not one.built:
            build = one.proof.build
            return VerificationError(one.name, f"{build.state}: {build.reason}", "see `onnxq prove`", code="Q705")
        return VerificationError(one.name, f"was not timed: {one.reason}", "see the cause", code="Q710")
    return None


def _make_parts(found: Bench, verbose: bool) -> Iterator[RenderableType]:
    count = f"{len(found.models)} model{'s' if len(found.models) > 1 else ''}"
    yield Text(count, style="bold").join_text(f"  ({', '.join(_list_facts(found))})", style="dim")
    columns, rows = _make_rows(found)
    yield make_table(columns, rows, right=columns[2:], names=("model",), fold=("heavy nodes",))
    yield Text("")
    yield make_sheet(_make_lines(found, verbose))


def _list_facts(found: Bench) -> Iterator[str]:
    yield found.version
    if found.chosen:
        yield f"{found.engine}: {found.chosen}"
    latency = next((one.best for one in found.models if one.best is not None), None)
    if latency is not None and "provider" in find_engine(found.engine).takes:
        if not found.provider:
            yield f"{CPU_KINDS[found.device]}, {format_threads(latency.threads)}"
        else:
            yield found.provider
    elif found.device:
        yield found.device
    yield format_shapes(found.shapes)


def _make_rows(found: Bench) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns: list[str] = ["model", "heavy nodes", "kernels", "moving"]
    timed = [name for name in ("eager", "graph") if any(getattr(one, name) is not None for one in found.models)]
    for name in timed:
        columns += [f"{'graph ' if name == 'graph' else ''}{figure}" for figure in ("median", "p99", "runs/s")]
    if timed:
        columns.append("faster")
    rows = []
    for one in found.models:
        kernels = ("", "") if one.proof is None else (str(len(one.proof.kernels)), str(len(one.proof.moving)))
        cells = [one.name, ", ".join(f"{count} {kind}" for kind, count in one.types.most_common()), *kernels]
        for name in timed:
            cells += _format_latency(getattr(one, name))
        ratio = found.ratio(one)
        rows.append(tuple(cells + ([f"{ratio:.2f}×" if ratio is not None else ""] if timed else [])))
    return tuple(columns), rows


def _format_latency(latency: Latency | None) -> Sequence[str]:
    if latency is None:
        return ("", "", "")
    return format_milliseconds(latency.median_ms), format_milliseconds(latency.p99_ms), f"{latency.per_second:.0f}"


def _make_lines(found: Bench, verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    if found.untimed is not None:
        builds = [one.proof.build.capability for one in found.models if one.proof is not None]
        yield "not timed", Text(_UNTIMED[found.untimed].format(capability=next(iter(builds), "")))
    for one in found.models:
        if one.proof is not None and not one.built:
            yield str(one.proof.build.state), Text(f"{one.name}: {one.proof.build.reason}", style="bold red")
        elif one.reason:
            yield "not timed", Text(f"{one.name}: {one.reason}")
        if verbose and one.proof is not None and one.built:
            build = one.proof.build
            kinds = ", ".join(f"{count} {kind}" for kind, count in one.proof.by_kind().most_common())
            told = f"{one.name}: built in {format_seconds(build.seconds)}, {format_bytes(build.engine_bytes)}; {kinds}"
            yield "kernels", Text(told)
    yield "data", Text(found.data)
