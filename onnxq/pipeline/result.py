"""The results of `quantize` and `apply`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from onnxq.graph import save_model
from onnxq.graph.save import name_data_file
from onnxq.plan import Plan, to_json
from onnxq.report import Report


@dataclass(frozen=True, eq=False)
class Result:
    """The quantized model, the plan it was made by (with its numbers), and the account of the run.

    inputs: the files of the float model, which nothing is written over.
    """

    model: onnx.ModelProto
    plan: Plan
    report: Report
    inputs: tuple[Path, ...] = ()

    def save(self, path: str | Path, *, overwrite: bool = False, external: bool | None = None) -> Result:
        """Write the model atomically; OutputError when `path` exists (unless overwrite) or is one of `inputs`."""
        save_model(self.model, Path(path), external=external, overwrite=overwrite, inputs=self.inputs)
        size = sum(part.stat().st_size for part in model_files(Path(path)))
        return replace(self, report=replace(self.report, output=str(path), output_bytes=size))

    def plan_json(self) -> str:
        """The plan as JSON, numbers included."""
        return to_json(self.plan)


def model_files(path: Path) -> tuple[Path, ...]:
    """The model file and, when there is one, the external data file written beside it."""
    # Written only for a model too large for one file, or where that was asked for.
    data = name_data_file(path)
    return (path, data) if data.exists() else (path,)
