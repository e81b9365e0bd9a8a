"""The results of `quantize` and `apply`, and the text of any result."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import onnx

from onnxq.annotate import Inspection
from onnxq.calibrate.parts import Part
from onnxq.emit import leave_out_notes
from onnxq.engines.bench import Bench
from onnxq.engines.diff.model import Difference
from onnxq.engines.prove.proof import Proof
from onnxq.errors import ConfigError
from onnxq.evaluation.perplexity import Perplexity
from onnxq.evaluation.profile import Profile
from onnxq.graph import ModelLike, attach_weights, save_model
from onnxq.graph.light import measure_size
from onnxq.graph.save import name_data_file
from onnxq.interop import Imported
from onnxq.plan import Plan, to_json
from onnxq.report import Report, View, show_plan, show_report
from onnxq.report.benches import show_bench
from onnxq.report.diffs import show_difference
from onnxq.report.imports import show_import, show_part
from onnxq.report.pairs import show_inspection
from onnxq.report.perplexities import show_perplexity
from onnxq.report.profiles import show_profile
from onnxq.report.proofs import show_proof
from onnxq.report.variants import Variants, show_variants
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
    return (path, data) if os.path.exists(data) else (path,)


_SHOWS: dict[type, Callable[[Any, View], None]] = {
    Bench: show_bench,
    Difference: show_difference,
    Imported: show_import,
    Inspection: show_inspection,
    Part: lambda part, view: show_part(part, "", view),
    Perplexity: show_perplexity,
    Plan: show_plan,
    Profile: show_profile,
    Proof: show_proof,
    Report: show_report,
    Result: lambda result, view: show_report(result.report, view),
    Variants: show_variants,
}


def summarize(result: object, *, verbose: bool = False, width: int | None = None) -> str:
    """The summary of a result as text: what the command of the same name prints.

    result: what `quantize`, `apply`, `make_plan`, `diff`, `prove`, `bench`, `profile_model`, `variants`, `perplexity`,
    `inspect`, `import_calibration` or `merge_parts` returned. verbose: all of it. width: in columns; None: breaks no
    line. Raises ConfigError for anything else.
    """
    show = _SHOWS.get(type(result))
    if show is None:
        names = ", ".join(sorted(known.__name__ for known in _SHOWS))
        raise ConfigError("result", f"{type(result).__name__} has no summary", f"give one of: {names}", code="Q304")
    text = io.StringIO()
    # Warnings stand in it too, where a command writes them.
    show(result, View(verbose=verbose, width=width, stream=text))
    return text.getvalue()
