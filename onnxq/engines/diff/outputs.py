"""The outputs of all runs, compared sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeGuard

import numpy as np

from onnxq.engines.diff.levels import Array, find_level
from onnxq.engines.diff.measure import Tallies
from onnxq.engines.diff.model import FLOAT, OFF, OutputDiff
from onnxq.graph import GraphIndex
from onnxq.sites import TensorId


@dataclass(eq=False)
class OutputSums:
    """Errors of the outputs."""

    names: Sequence[str]
    steps: Mapping[str, float]
    tallies: Tallies
    # Samples of each run: a file may hold fewer than were run here.
    seen: dict[str, int] = field(default_factory=dict)
    # By output that cannot be compared: its kind.
    not_numeric: dict[str, str] = field(default_factory=dict)

    def add(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """One sample of all runs."""
        for name in self.names:
            if not _is_numeric(value := values[FLOAT][name]):
                self.not_numeric[name] = "a tensor of text" if isinstance(value, np.ndarray) else "a sequence or a map"
        for run, found in values.items():
            self.seen[run] = self.seen.get(run, 0) + 1
            for name, against in product(self.names, (FLOAT, OFF)):
                mine, other = found.get(name), values.get(against, {}).get(name)
                # Float is nobody's quantized run, and no run is compared with itself.
                if run not in (FLOAT, against) and _is_numeric(mine) and _is_numeric(other):
                    self.tallies.add(name, run, against, other, mine, self.steps[name])

    def make_results(self, runs: Sequence[str], classes: Mapping[str, bool]) -> tuple[OutputDiff, ...]:
        """Output by output. classes: as of `find_class_scores`."""
        errors = self.tallies.list_errors
        return tuple(
            OutputDiff(
                name=name,
                accuracy=errors(name, runs, FLOAT),
                engines=errors(name, runs, OFF),
                classes=classes.get(name),
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
