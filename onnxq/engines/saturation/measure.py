"""How often 16-bit sums saturate on samples, and the error that leaves at each output of a model."""

from collections import Counter as Counts
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import TensorProto

from onnxq.arrays import ArrayDict, Arrays
from onnxq.engines.saturation.emulate import Emulation, emulate_saturation
from onnxq.evaluation.compare import MatchedRunner, ReferenceRunner, compare_models
from onnxq.graph import ModelLike
from onnxq.progress import Tick
from onnxq.runtime import Session, tap_tensors
from onnxq.runtime.tap import Probe
from onnxq.sites import NameSet, Refusals, TensorId


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """One node on the samples: how many of the sums it computed saturated."""

    node: str
    saturated: int
    sums: int

    @property
    def share(self) -> float:
        """Of all sums of the node, 0 to 1."""
        return self.saturated / self.sums if self.sums else 0.0


@dataclass(frozen=True, kw_only=True)
class OutputCost:
    """One output: the saturating model against the exact one."""

    output: str
    # inf where no sum of a sample saturated.
    sqnr_db: float
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class SaturationCost:
    """The errors that CPUs without VNNI make on samples."""

    data: str = ""
    samples: int
    synthetic: bool = False
    # Those whose weights can overflow.
    nodes: tuple[NodeCost, ...]
    outputs: tuple[OutputCost, ...]
    # Those of the nodes that could not be emulated.
    skipped: Refusals

    @property
    def saturated(self) -> int:
        """Sums that saturated, of all nodes."""
        return sum(one.saturated for one in self.nodes)


def measure_saturation(
    proto: ModelLike,
    samples: Iterable[Arrays],
    *,
    nodes: NameSet | None = None,
    threads: int = 0,
    on_sample: Tick = lambda: None,
) -> SaturationCost:
    """Run the model with exact and with saturating sums, both without optimizations.

    nodes: as of `emulate_saturation`. Raises DataError for samples that do not fit.
    """
    found = emulate_saturation(proto, nodes)
    exact = ReferenceRunner(found.exact, optimize=False, threads=threads, arena=False)
    taking = replace(found, saturating=exact.selections.take_choices(found.saturating))
    run = SaturatingRun(taking, threads=threads)
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        on_sample()

    pair = {"saturation": (exact, MatchedRunner(exact, run))}
    errors = compare_models(pair, samples, on_sample=count)["saturation"].results()
    return SaturationCost(
        samples=seen,
        nodes=run.nodes(),
        outputs=tuple(
            OutputCost(output=one.name, sqnr_db=one.sqnr_db, max_abs=one.max_abs) for one in errors
        ),
        skipped=(*found.skipped, *run.refusals),
    )


@dataclass(eq=False)
class SaturatingRun:
    """The saturating model as a session that also counts."""

    emulation: Emulation
    threads: int = 0
    # One of the main graph to give instead of the outputs.
    tensor: str = ""
    refusals: Refusals = ()
    # Of each node, by its counters' tensors.
    _totals: Counts[TensorId] = field(default_factory=Counts)

    def __post_init__(self) -> None:
        counters = self.emulation.counters
        counted = [tensor for one in counters for tensor in (one.saturated, one.size)]
        tapped = tap_tensors(
            self.emulation.saturating,
            [*counted, *([TensorId(self.tensor)] if self.tensor else [])],
            only=bool(self.tensor),
            probe=Probe(dtype=TensorProto.INT64),
        )
        self._counts = {one: tapped.outputs[one] for one in counted if one in tapped.outputs}
        self.refusals = tapped.refusals
        self._session = Session(tapped.proto, optimize=False, threads=self.threads, arena=False)

    def run(self, feeds: Arrays) -> ArrayDict:
        """The model's outputs, or the tensor asked for."""
        values = self._session.run(feeds)
        for tensor, output in self._counts.items():
            self._totals[tensor] += int(np.sum(values.pop(output)))
        return values

    def nodes(self) -> tuple[NodeCost, ...]:
        """The counts so far."""
        total = self._totals
        return tuple(
            NodeCost(
                node=one.node,
                saturated=total[one.saturated],
                sums=round(total[one.size] * one.sums),
            )
            for one in self.emulation.counters
        )
