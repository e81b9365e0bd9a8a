"""The outputs of all runs, compared sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeGuard

import numpy as np

from onnxq.engines.diff.levels import find_level
from onnxq.engines.diff.measure import Array, Tally
from onnxq.engines.diff.model import FLOAT, OFF, Error, OutputDiff
from onnxq.graph import GraphIndex
from onnxq.sites import TensorId


@dataclass(eq=False)
class OutputSums:
    """Errors of the outputs by (output, run, against). not_numeric: kinds of the outputs that cannot be compared."""

    names: Sequence[str]
    top_k: int
    steps: Mapping[str, float]
    seen: dict[str, int] = field(default_factory=dict)
    not_numeric: dict[str, str] = field(default_factory=dict)
    _tallies: dict[tuple[str, str, str], Tally] = field(default_factory=dict)

    def add(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """One sample of all runs."""
        for name in self.names:
            if not _is_numeric(value := values[FLOAT][name]):
                self.not_numeric[name] = "a tensor of text" if isinstance(value, np.ndarray) else "a sequence or a map"
        for run, found in values.items():
            self.seen[run] = self.seen.get(run, 0) + 1
            for name, against in product(self.names, (FLOAT, OFF)):
                mine, other = found.get(name), values.get(against, {}).get(name)
                if run not in (FLOAT, against) and _is_numeric(mine) and _is_numeric(other):
                    fresh = Tally(name, self.top_k, self.steps[name], sliced=True)
                    self._tallies.setdefault((name, run, against), fresh).update(other, mine)

    def find_error(self, name: str, run: str, against: str) -> Error | None:
        """The error of one output of one run; None when it was not compared."""
        tally = self._tallies.get((name, run, against))
        return None if tally is None else tally.error(run, against)

    def find_worst_sample(self, name: str, run: str) -> int:
        """Where a run is farthest from ORT without optimizations."""
        return self._tallies[name, run, OFF].worst_sample

    def make_results(self, runs: Sequence[str]) -> tuple[OutputDiff, ...]:
        """Output by output."""
        return tuple(
            OutputDiff(
                name=name,
                accuracy=tuple(error for run in runs if (error := self.find_error(name, run, FLOAT)) is not None),
                engines=tuple(error for run in runs if (error := self.find_error(name, run, OFF)) is not None),
            )
            for name in self.names
        )


def find_output_step(index: GraphIndex, name: str) -> float:
    """One quantization step of an output's last quantizer; 0 when a float node makes it."""
    node = index.producer(TensorId(name))
    level = find_level(index, node.inputs[0]) if node is not None and node.op_type == "DequantizeLinear" else None
    return level.scale if level is not None else 0.0


def _is_numeric(value: object) -> TypeGuard[Array]:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
