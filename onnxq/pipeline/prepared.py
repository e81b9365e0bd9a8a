"""From a file to a model ready for planning: loaded, named, rewritten without changing its function, proved so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxq import targets
from onnxq.annotate import already_quantized, find_operators
from onnxq.annotate.find import chains
from onnxq.config import Config
from onnxq.errors import ConfigError, VerificationError
from onnxq.graph import (
    GraphIndex,
    Model,
    ModelLike,
    at_opset,
    index_of,
    infer_shapes,
    inline_functions,
    load_model,
    name_nodes,
    opset_of,
    store_densely,
    strip_weights,
)
from onnxq.graph.half import computes_in_half, widen_half
from onnxq.nearest import did_you_mean
from onnxq.passes import PASSES, PassReport, prepare
from onnxq.progress import Progress, counted, silent
from onnxq.runtime import Session
from onnxq.verify import Array, OutputError, compare

# DequantizeLinear has an axis from opset 13 on.
_MINIMUM_OPSET = 13
# Rewrites reorder float32 arithmetic; anything below this is a different function.
EQUIVALENT_DB = 60.0
# float16 rounds every tensor to 11 bits; float32 in its place differs by that.
_EQUIVALENT_HALF_DB = 35.0
_WIDEN = "float32-compute"
# Passes of later stages, which `skip` may name too.
_LATER = frozenset({"equalize", "absorb", "smooth", "ranges", "bits", "sweep", "views", "promote"})
_OPSET = "opset"
_DENSE = "dense"
# All that a plan's `prepare` may name, and all that `skip` may.
PASS_NAMES = frozenset((_DENSE, _OPSET, _WIDEN, *_LATER, *(entry.name for entry in PASSES)))
SKIPPABLE = PASS_NAMES - {_DENSE, _OPSET, _WIDEN}


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """source: as loaded, every node named; before: its index; proto: the float model that is planned."""

    source: Model
    before: GraphIndex
    named: ModelLike
    proto: ModelLike
    reports: tuple[PassReport, ...]

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the passes that changed something, in order."""
        return tuple(report.name for report in self.reports if report.changed)

    @property
    def already(self) -> str:
        """ "already quantized: N pairs kept", with the operators on integers; "" for a float model."""
        index = index_of(self.proto)
        pairs = sum(chain.dequantize is not None for chain in chains(index))
        return already_quantized(pairs, len(find_operators(index)))

    @property
    def accounts(self) -> tuple[str, ...]:
        """A line for each pass of a later stage: what it did, or why it was rolled back."""
        lines = []
        for report in self.reports:
            if report.name in _LATER:
                reasons = [one.reason for one in report.skipped if one.reason.startswith("rolled back")]
                said = report.changed[0] if report.changed else reasons[0] if reasons else "nothing to gain"
                lines.append(f"{report.name}: {said}")
        return tuple(lines)

    @property
    def rewrites(self) -> tuple[str, ...]:
        """A line for each preparation pass that changed something."""
        lines = []
        for report in self.reports:
            if report.changed and report.name not in _LATER:
                more = f", … {len(report.changed)} in all" if len(report.changed) > 1 else ""
                lines.append(f"{report.name}: {report.changed[0]}{more}")
        return tuple(lines)


def check_skip(config: Config) -> None:
    """ConfigError, with file and line, for a name in `skip` that no pass has."""
    for k, name in enumerate(config.skip):
        if name not in SKIPPABLE:
            raise ConfigError(
                config.where(f"skip[{k}]"), f"no pass is called {name!r}", did_you_mean(name, SKIPPABLE), code="Q320"
            )


def load(
    source: object,
    *,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
    target: str = "ort",
    progress: Progress = silent,
) -> PreparedModel:
    """Load and prepare for a target. `skip` leaves passes out; `only` runs no others (a plan carried out again)."""
    with progress("reading the model"):
        model = load_model(source)  # type: ignore[arg-type]
        named = name_nodes(strip_weights(model.proto))
    with progress("simplifying the graph"):
        return _prepared(model, named, skip, only, target)


def _prepared(
    model: Model, named: ModelLike, skip: Iterable[str], only: Iterable[str] | None, target: str
) -> PreparedModel:
    proto = inline_functions(named) if named.functions else named
    dense = store_densely(proto)
    upgraded = at_opset(dense, _MINIMUM_OPSET)
    left_out = frozenset(skip)
    if only is not None:
        left_out |= frozenset((_WIDEN, *(entry.name for entry in PASSES))) - frozenset(only)
    reports = []
    if dense is not proto:
        reports.append(PassReport(_DENSE, ("sparse weights are stored densely",), ()))
    if upgraded is not dense:
        reports.append(PassReport(_OPSET, (f"{opset_of(proto)} -> {opset_of(upgraded)}",), ()))
    typed = infer_shapes(upgraded)
    if _WIDEN not in left_out and not targets.target(target).half and computes_in_half(typed):
        typed = infer_shapes(widen_half(upgraded))
        reports.append(PassReport(_WIDEN, ("float16 is computed in float32",), ()))
    result = prepare(typed, skip=left_out - {_WIDEN} - _LATER, target=target)
    reports.extend(result.reports)
    return PreparedModel(model, index_of(named), named, infer_shapes(strip_weights(result.proto)), tuple(reports))


def prove_equal(
    prepared: PreparedModel, samples: Iterable[Mapping[str, Array]], *, progress: Progress = silent
) -> tuple[OutputError, ...]:
    """Run the model before and after preparation; VerificationError when a rewrite changed its function."""
    with progress("comparing the simplified model with the original") as task:
        before = Session(prepared.named, optimize=False)
        after = Session(prepared.proto, optimize=False)
        found = compare({"prepare": (before, after)}, counted(samples, task))["prepare"]
    half = _WIDEN in prepared.passes or computes_in_half(prepared.proto)
    enough = _EQUIVALENT_HALF_DB if half else EQUIVALENT_DB
    for output in found:
        if output.sqnr_db < enough and not np.isclose(output.max_abs, 0.0, atol=1e-6):
            raise VerificationError(
                f"output {output.name}",
                f"preparation changed it ({output.sqnr_db:.1f} dB, max |difference| {output.max_abs:.3g})",
                f"leave passes out with `skip: [{', '.join(prepared.passes)}]` and report this model",
                code="Q702",
            )
    return found


def reported(prepared: PreparedModel, report: PassReport) -> PreparedModel:
    """The model with one more account."""
    return replace(prepared, reports=(*prepared.reports, report))
