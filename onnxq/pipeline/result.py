"""The results of `quantize` and `apply`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import onnx

from onnxq.emit import leave_out_notes
from onnxq.graph import ModelLike, attach_weights, save_model
from onnxq.graph.light import measure_size
from onnxq.graph.save import name_data_file
from onnxq.plan import Plan, to_json
from onnxq.report import Report


@dataclass(frozen=True, eq=False)
class Result:
    """The quantized model, the plan it was made by (with its numbers), and the account of the run.

    light: the model with its large weights beside it, which may be in files. inputs: the files of the float model,
    which nothing is written over.
    """

    light: ModelLike
    plan: Plan
    report: Report
    inputs: tuple[Path, ...] = ()

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The quantized model, weights and all; over 2 GB it cannot be serialized, but `save` writes it."""
        return attach_weights(self.light)

    def save(self, path: str | Path, *, overwrite: bool = False, external: bool | None = None) -> Result:
        """Write the model atomically; OutputError when `path` exists (unless overwrite) or is one of `inputs`."""
        save_model(self.light, Path(path), external=external, overwrite=overwrite, inputs=self.inputs)
        size = sum(part.stat().st_size for part in model_files(Path(path)))
        return replace(self, report=replace(self.report, output=str(path), output_bytes=size))

    def leave_out_notes(self, level: Literal["full", "names", "none"]) -> Result:
        """The result with a model whose notes are those of the level, see docs/cli.md; the plan stays beside it."""
        if level == "full":
            return self
        light = leave_out_notes(self.light, level)
        return replace(self, light=light, report=replace(self.report, output_bytes=measure_size(light)))

    def plan_json(self) -> str:
        """The plan as JSON, numbers included."""
        return to_json(self.plan)


def model_files(path: Path) -> tuple[Path, ...]:
    """The model file and, when there is one, the external data file written beside it."""
    # Written only for a model too large for one file, or where that was asked for.
    data = name_data_file(path)
    return (path, data) if data.exists() else (path,)
