"""The result of `quantize` and `apply`, and the files that it is written to."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import onnx

from onnxq.annotate import BITS_ATTRIBUTE_WARNING, find_pairs, write_bits
from onnxq.config import Config
from onnxq.emit import leave_out_notes
from onnxq.files import write_text
from onnxq.graph import ModelLike, attach_weights, save_model
from onnxq.graph.light import measure_size
from onnxq.graph.save import name_data_file
from onnxq.plan import Plan, to_json
from onnxq.progress import Progress, silent
from onnxq.report.model import Report
from onnxq.wording import abbreviate


@dataclass(frozen=True, eq=False)
class Result:
    """The quantized model, the plan it was made by (with its numbers), and the account of the run.

    light: the model with its large weights beside it, which may be in files. inputs: the files of the float model,
    which nothing is written over.
    """

    __repr__ = abbreviate

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
        size = sum(part.stat().st_size for part in list_files(Path(path)))
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


def list_files(path: Path) -> tuple[Path, ...]:
    """The model file and, when there is one, the external data file written beside it."""
    # Written only for a model too large for one file, or where that was asked for.
    data = name_data_file(path)
    return (path, data) if os.path.exists(data) else (path,)


def write_plan(plan: Plan, out: str | Path | None, force: bool, progress: Progress = silent) -> None:
    """Write a plan as JSON. out: the file; none: nothing is written."""
    if out:
        with progress("writing"):
            write_text(Path(out), to_json(plan), overwrite=force)


def write_result(result: Result, config: Config, out: str | Path | None, force: bool) -> Result:
    """The result with the notes and bits that the configuration asks for, its model and its plan written."""
    options = config.output
    if options.bits_attribute:
        model = write_bits(result.model, find_pairs(result.model), bits_attribute=True)
        warnings = (*result.report.warnings, BITS_ATTRIBUTE_WARNING)
        result = replace(result, light=model, report=replace(result.report, warnings=warnings))
    result = result.leave_out_notes(options.notes)
    if out is not None:
        result = result.save(out, overwrite=force, external=options.external_data or None)
    write_plan(result.plan, options.plan, force)
    return result
