"""Proofs of engines as tables, and as JSON that another proof can be compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import RenderableType

from onnxq.backends.engine import Tensor
from onnxq.engines.prove.proof import INT8, QUANTIZED, NodeProof, Proof, Requirement, SiteState
from onnxq.errors import VerificationError
from onnxq.report.columns import Text
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.sums import format_cost, make_sums_tables, saturation_summary
from onnxq.report.terminal import (
    View,
    format_bytes,
    format_seconds,
    format_warning,
    join_lines,
    make_sheet,
    make_table,
    select_rows,
    show_result,
)
from onnxq.sites import Caution

# Rows of a list without `verbose`, and nodes named in an error.
_SHOWN, _NAMED = 12, 5
# Fields in the JSON. `prove --compare` reads them back.
_NODE_FIELDS = ("op", "type", "kernel", "kind", "types", "kernels", "reason")
_SITE_FIELDS = ("role", "state", "rule", "readers", "unfused", "kernels", "reason")


def proof_json(proof: Proof, error: Mapping[str, Any] | None = None) -> str:
    """Convert the proof to one strict JSON document; nodes and sites are keyed by name."""
    return to_json(
        {
            "schema": SCHEMA,
            "error": error,
            "source": proof.source,
            "holds": proof.holds,
            "build": proof.build,
            "chosen": proof.chosen,
            "counts": {
                "kernels": len(proof.kernels),
                "moving": len(proof.moving),
                "kinds": proof.by_kind(),
                "ops": proof.by_op(),
            },
            "nodes": {one.node: _pick_fields(one, _NODE_FIELDS) for one in proof.nodes},
            "sites": {one.site: _pick_fields(one, _SITE_FIELDS) for one in proof.sites},
            "requirements": proof.requirements,
            "unmet": proof.unmet,
            "weights": proof.weights,
            "cost": proof.cost,
            "require_exact": proof.require_exact,
            "compared": proof.compared,
            "changes": proof.changes,
            "warnings": list(_find_warnings(proof)),
            "kernels": proof.kernels,
        }
    )


def _pick_fields(value: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def show_proof(proof: Proof, view: View = View(), *, error: Mapping[str, Any] | None = None) -> None:
    """Print the proof. verbose: every pair and every kernel, not only the pairs that did not fuse.

    `top`: of the nodes those that are not in int8 come first. error: what the command fails with, for the JSON.
    """
    warnings = map(format_warning, _find_warnings(proof))
    show_result(view, lambda: proof_json(proof, error), _make_parts(proof, view), warnings)


def find_unmet_requirement(proof: Proof) -> VerificationError | None:
    """The error of an engine that was not built or of a requirement that does not hold; None when all holds."""
    build = proof.build
    if not proof.built:
        told = "" if build.reduced is not None else "`reduce=True` finds the smallest part that does this; "
        told = "`plugin=…` takes the library that implements it; " if build.needs_plugin else told
        subject = f"node {build.node}" if build.node else (proof.source or "the model")
        return VerificationError(subject, f"{build.state}: {build.reason}", f"{told}`out=…` keeps the log", code="Q705")
    for found in (one for one in proof.requirements if one.unmet):
        named = ", ".join(found.unmet[:_NAMED]) + (", …" if len(found.unmet) > _NAMED else "")
        option = f"`forbid='{found.dtype}'`" if found.forbidden else f"`require='{found.dtype}'`"
        told = f"{'in' if found.forbidden else 'not in'} {found.dtype}"
        told = "not run as its pairs say" if found.dtype == QUANTIZED else told
        first = proof.node(found.unmet[0])
        # Of a node that is quantized, the types that its kernel reads and writes.
        reason = first.reason or f"{first.node} runs in {first.type}: {first.types}"
        cause = f"{told} ({len(found.unmet)} in all)"
        return VerificationError(f"{option}: {named}", cause, reason, code="Q706")
    if not proof.holds:
        fix = "quantize the float model with onnxq (saturation: avoid, the default), or with 7-bit weights"
        return VerificationError("`require_exact=True`", saturation_summary(proof.weights), fix, code="Q707")
    return None


def _find_warnings(proof: Proof) -> Iterator[Caution]:
    yield from proof.warnings
    summary = saturation_summary(proof.weights)
    # Where exact sums are required they are an unmet requirement, listed as such.
    if summary and not proof.require_exact:
        yield Caution("W107", summary if proof.cost is not None else f"{summary}; `data=…` says how often they do")


def _make_parts(proof: Proof, view: View) -> Iterator[RenderableType]:
    build = proof.build
    facts = [build.version or build.engine]
    if proof.chosen:
        facts.append(f"{build.engine}: {proof.chosen}")
    if build.capability:
        facts.append(f"compute capability {build.capability}")
    facts.append(f"{build.state} in {format_seconds(build.seconds)}")
    name = PurePath(proof.source).name or "model"
    yield Text(name, style="bold").join_text(f"  ({', '.join(facts)})", style="dim")
    if proof.built:
        yield from _make_tables(proof, view)
    yield make_sheet(_make_rows(proof, view.verbose))


def _make_tables(proof: Proof, view: View) -> Iterator[RenderableType]:
    if proof.nodes:
        nodes = proof.nodes if view.top is None else sorted(proof.nodes, key=lambda one: one.type == INT8)
        first, more = select_rows(nodes, view)
        rows = ((one.node, one.op, one.type, one.kind, one.types) for one in first)
        columns = ("node", "op", "type", "kernel", "reads -> writes")
        yield make_table(columns, rows, names=("node", "kernel"), fold=("reads -> writes",))
        yield from _make_end(more)
    pairs = [one for one in proof.sites if view.verbose or one.state is not SiteState.FUSED]
    if pairs:
        shown, more = select_rows(pairs, view)
        cells = [(one.site, one.role, str(one.state), one.rule, one.reason) for one in shown]
        yield make_table(("pair", "role", "state", "rule", "why"), cells, names=("pair",), fold=("rule", "why"))
        yield from _make_end(more)
    yield from make_sums_tables(proof.weights, proof.cost, view)
    if view.verbose and proof.kernels:
        kernels, more = select_rows(proof.kernels, view)
        lines = (
            (one.name, one.kind, *map(_format_types, (one.inputs, one.weights, one.outputs)), " ".join(one.nodes))
            for one in kernels
        )
        titles = ("kernel", "kind", "inputs", "constants", "outputs", "nodes")
        yield make_table(titles, lines, names=titles[:2], fold=titles[2:])
        yield from _make_end(more)


def _make_end(more: str) -> Iterator[RenderableType]:
    if more:
        yield Text(more, style="dim")
    yield Text("")


def _format_types(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in _count_types(tensors))


def _count_types(tensors: Sequence[Tensor]) -> list[tuple[str, int]]:
    return list(Counter(tensor.dtype or "?" for tensor in tensors).items())


def _make_rows(proof: Proof, verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    build = proof.build
    if not proof.built:
        blamed = f"node {build.node}: " if build.node else ""
        yield str(build.state), Text(f"{blamed}{build.reason}", style="bold red")
        if build.log:
            yield "last lines", Text(*build.log if verbose else build.log[-6:])
    if build.reduced is not None:
        found = build.reduced
        names = ", ".join(f"{name} ({op})" for name, op in zip(found.nodes, found.ops, strict=True))
        yield (
            "smallest",
            Text(
                f"{len(found.nodes)} nodes that do the same: {names} "
                f"({found.builds} builds, {format_seconds(found.seconds)})"
            ),
        )
    totals = {op: types.total() for op, types in proof.by_op().items()}
    alone = Counter((one.op, one.stored) for one in proof.nodes if one.stored and INT8 not in one.computed)
    if totals and (not alone or any(one.type == INT8 for one in proof.nodes)):
        yield "int8", Text(", ".join(f"{op} {types[INT8]}/{totals[op]}" for op, types in proof.by_op().items()))
    if alone:
        yield "weights", Text(", ".join(f"{op} {n}/{totals[op]} in {dtype}" for (op, dtype), n in alone.items()))
    reasons = _list_reasons(proof.nodes)
    if reasons:
        yield "not int8", join_lines(reasons, verbose, _SHOWN)
    if proof.sites:
        states = Counter(one.state for one in proof.sites)
        yield "pairs", Text(f"{len(proof.sites)}: " + ", ".join(f"{count} {state}" for state, count in states.items()))
    if proof.kernels:
        kinds = ", ".join(f"{count} {kind}" for kind, count in proof.by_kind().most_common(None if verbose else _SHOWN))
        moving = f"; {len(proof.moving)} of them only move or convert data" if proof.moving else ""
        yield "kernels", Text(f"{len(proof.kernels)}: {kinds}{moving}")
    if build.engine_bytes:
        yield "engine", Text(format_bytes(build.engine_bytes))
    for one in proof.requirements:
        yield ("forbidden" if one.forbidden else "required"), Text(_describe_requirement(one))
    if proof.require_exact:
        yield "required", Text(f"exact: {saturation_summary(proof.weights) or 'no weight can overflow'}")
    if proof.cost is not None:
        yield "saturation", Text(*format_cost(proof.cost))
    if proof.compared:
        lines = [str(change) for change in proof.changes] or ["no difference"]
        yield f"since {PurePath(proof.compared).name}", Text(*lines)
    if build.saved:
        yield "saved", Text(*build.saved)


def _describe_requirement(one: Requirement) -> str:
    if one.forbidden:
        broken = f"{len(one.unmet)}/{len(one.nodes)}: {', '.join(one.unmet)}"
        return f"{one.dtype}: {broken if one.unmet else 'none'}"
    manner = one.dtype if one.dtype == QUANTIZED else f"in {one.dtype}"
    met = f"{one.pattern}: {len(one.nodes) - len(one.unmet)}/{len(one.nodes)} {manner}"
    return met + (f"; not: {', '.join(one.unmet)}" if one.unmet else "")


def _list_reasons(nodes: Sequence[NodeProof]) -> list[str]:
    """List the reasons why nodes stayed float, each once, with its number of nodes and the first of them."""
    groups: dict[str, list[str]] = {}
    for one in nodes:
        if one.reason:
            groups.setdefault(f"{one.op}: {one.reason}", []).append(one.node)
    return [f"{len(names)} {reason} ({names[0]}{', …' if len(names) > 1 else ''})" for reason, names in groups.items()]
