"""Export of a quantized module to ONNX: the float network, the plan of its quantizers, and the quantized model."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from onnx import ModelProto
from torch import nn

import onnxq
from onnxq.annotate import find_pairs, write_bits
from onnxq.config import Config
from onnxq.errors import ModelError, OutputError
from onnxq.files import ScratchFolder, check_outputs, is_stream, write_text
from onnxq.graph import GraphIndex, save_model
from onnxq.interop import Marked
from onnxq.numerics import quantize
from onnxq.plan import Plan, SitePlan, to_json
from onnxq.planner.sums import count_saturating, read_constant
from onnxq.sites import Caution, Site
from torch_frontend.export import graph
from torch_frontend.export.check import ExportCheck, check_export
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing.modules import as_inputs


class Exportable(nn.Module):
    """A module that wraps the one to export and knows its target and mode, such as the `QuantModel` above this room."""

    quant_config: Config
    model: nn.Module

    def begin_export(self) -> nn.Module:
        """The module to export. Raises PlanError where it is not ready."""
        raise NotImplementedError

    def mark_exported(self) -> None:
        """Called after the files are written."""
        raise NotImplementedError


def write_all(
    models: dict[Path, ModelProto], texts: dict[Path, str], *, overwrite: bool
) -> tuple[Path, ...]:
    """Write everything into folders beside the targets, then move it into place; return the files, data files too.

    Raises OutputError if a file is in the way, cannot be written, or does not fit on the disk; no file is left then.
    """
    # Before anything is computed or written; again below, with the data files.
    check_outputs("", *models, *texts, force=overwrite)
    # A pipe or device can take one file, not three.
    for path in filter(is_stream, (*models, *texts)):
        raise OutputError(
            str(path),
            "is a pipe or device, and an export is several files",
            "name a file",
            code="Q603",
        )
    staged: dict[Path, Path] = {}
    try:
        with ExitStack() as folders:
            for path, content in {**models, **texts}.items():
                # Beside the target: on one disk os.replace moves a file in one step.
                folder = folders.enter_context(ScratchFolder(path.parent))
                if isinstance(content, str):
                    write_text(folder / path.name, content)
                else:
                    save_model(content, folder / path.name)
                staged |= {file: path.with_name(file.name) for file in folder.iterdir()}
            check_outputs("", *staged.values(), force=overwrite)
            # Data before models: a model must never be there without the data that it refers to.
            for file in sorted(staged, key=lambda file: staged[file] in models):
                os.replace(file, staged[file])
    except OSError as error:
        subject = str(next(iter(models), ""))
        raise OutputError(
            subject,
            error.strerror or str(error),
            "free space or choose another folder",
            code="Q604",
        ) from error
    return tuple(staged.values())


def warn_of_moved_weights(marked: Marked, quantizers: Iterable[Quantizer]) -> Plan:
    """The plan, with a warning for every weight whose 16-bit sums are kept in the file or in training, not in both.

    A QuantModel keeps those of its own target; quantizers made by hand, or for another target, may not.
    """
    index = GraphIndex(marked.model)
    lines = []
    for quantizer in quantizers:
        for place in marked.sites[quantizer.site] if quantizer.role.is_weight else ():
            line = _explain_difference(quantizer, marked.plan.site(place), index)
            lines += [Caution("W107", f"{quantizer.site}: {line}")] if line else []
    return replace(marked.plan, warnings=(*marked.plan.warnings, *lines))


def _explain_difference(quantizer: Quantizer, planned: SitePlan, index: GraphIndex) -> str:
    """How the file's weight differs from training's; "" if it does not."""
    trained = bool(quantizer.sum_orders())
    if trained and not planned.sum_orders:
        return "kept 16-bit sums in training that the kernels of this file do not have: rounded to nearest here"
    # The float file holds the baked weight, whose integers are those of training.
    value = read_constant(index, planned.site)
    if trained or not planned.sum_orders or planned.qparams is None or value is None:
        return ""
    # The file keeps sums that training did not: it matters only where the trained integers overflow one.
    _, sums = count_saturating(quantize(value, planned.qparams, planned.spec), planned.sum_orders)
    if not sums:
        return ""
    return (
        f"{sums} sums would overflow 16 bits on CPUs without VNNI: the file has other integers than training had; "
        "train a QuantModel made for this target, or call `bind_sums` of the quantizer"
    )


# First opset with float16, 4-bit, 16-bit and blocked QuantizeLinear.
_WIDE_OPSET = 21


@dataclass(frozen=True, eq=False)
class Exported:
    """An exported model.

    model: quantized. float_model: the same network without pairs. plan: turns float_model into model.
    sites: quantizer's site -> its sites in these. files: the files written. check: how far the written file is from
    torch on the example inputs; None where it was not run.
    """

    model: ModelProto
    float_model: ModelProto
    plan: Plan
    sites: Mapping[str, tuple[Site, ...]]
    files: tuple[Path, ...] = ()
    check: ExportCheck | None = None


def to_onnx(
    model: nn.Module,
    example_inputs: Any,
    *,
    target: str | None = None,
    opset: int | None = None,
    optimize: bool = True,
    dynamic_batch: bool = False,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    name: str = "",
) -> Exported:
    """Export a QuantModel, or any module with calibrated quantizers in it.

    example_inputs: one batch: a tensor, a tuple of positions, or a mapping by name. target: a name of
    `onnxq.backends`; None: the QuantModel's own, ONNX Runtime's for other modules. opset: None: the one that the
    quantizers need. optimize: run the exporter's own optimizer. dynamic_batch: the first axis of every input has any
    size; dynamic_shapes: as for torch.export.

    Every quantizer that is on leaves a marker in the graph, from which onnxq reads its place; the sites found there
    must be those of the quantizers. The model itself does not change.
    Raises PlanError before calibration, CalibrationError for qparams that cannot be stored, ModelError naming a
    quantizer that the graph lost, for a model in bfloat16, or if torch cannot export it.
    """
    config = Config()
    inner = model
    if isinstance(model, Exportable):
        config = model.quant_config
        inner = model.begin_export()
    quantizers = graph.active_quantizers(inner)
    _check_types(inner)
    inputs = graph.order_inputs(inner, as_inputs(example_inputs))
    shapes = (
        graph.batch_dims(inputs) if dynamic_batch and dynamic_shapes is None else dynamic_shapes
    )
    if inputs.kwargs and isinstance(shapes, dict):
        # torch.export asks for an entry of every input by name, None where nothing is free.
        shapes = {**dict.fromkeys(inputs.kwargs), **shapes}
    with graph.prepare_markers(inner, quantizers, *inputs):
        proto = graph.export_with_markers(
            inner,
            inputs,
            opset=opset or _choose_opset(inner, quantizers),
            optimize=optimize,
            dynamic_shapes=shapes,
            input_names=input_names,
            output_names=output_names,
        )
    marked = onnxq.strip_markers(
        proto,
        target=target or config.target,
        mode=config.mode,
        quantizers=[quantizer.site for quantizer in quantizers],
        name=name,
        saturation=config.saturation,  # as in training, whose integers the file has
    )
    plan = warn_of_moved_weights(marked, quantizers)
    # The same emitter as for ONNX files, so that trained and calibrated models cannot differ in form.
    return Exported(onnxq.apply(marked.model, plan).model, marked.model, plan, marked.sites)


def export_onnx(
    model: nn.Module,
    path: str | Path,
    example_inputs: Any,
    *,
    float_path: str | Path | None = None,
    plan_path: str | Path | None = None,
    force: bool = False,
    check: bool = True,
    bits_attribute: bool = False,
    **options: Any,
) -> Exported:
    """`to_onnx`, written to files: `net.onnx`, and beside it `net.float.onnx` and `net.plan.json`, all or none.

    `onnxq apply net.float.onnx net.plan.json` makes the quantized model again, also from a float model that other
    tools have rewritten. check: run the written file on the example inputs, with ONNX Runtime's optimizations and
    without, and warn where it is farther from torch than rounding takes it. bits_attribute: also write
    `net_extra.onnx`, whose Q and DQ nodes have the integer attribute `bits`, which ONNX Runtime refuses. options: those
    of `to_onnx`.
    Raises OutputError for a file that exists (unless force) or cannot be written; else as `to_onnx`.
    """
    whole = Path(path)
    bare = (
        Path(float_path) if float_path is not None else whole.with_name(f"{whole.stem}.float.onnx")
    )
    plan = Path(plan_path) if plan_path is not None else whole.with_name(f"{whole.stem}.plan.json")
    extra = (whole.with_name(f"{whole.stem}_extra.onnx"),) if bits_attribute else ()
    # Before the export, which takes long.
    check_outputs("", whole, bare, plan, *extra, force=force)
    done = to_onnx(model, example_inputs, **{"name": bare.name, **options})
    marked = {path: write_bits(done.model, find_pairs(done.model)) for path in extra}
    models = {bare: done.float_model, whole: done.model, **marked}
    files = write_all(models, {plan: to_json(done.plan)}, overwrite=force)
    inner = model
    if isinstance(model, Exportable):
        model.mark_exported()
        inner = model.model
    return replace(
        done, files=files, check=check_export(inner, whole, example_inputs) if check else None
    )


def _check_types(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype in (torch.bfloat16, torch.float64):
            raise ModelError(
                name,
                f"is {tensor.dtype}, and ONNX Runtime quantizes only float32 and float16",
                "call .float() on the model before the export",
                code="Q121",
            )


def _choose_opset(model: nn.Module, quantizers: Sequence[Quantizer]) -> int | None:
    """The opset that the quantizers need; None leaves the choice to torch."""
    half = any(parameter.dtype == torch.float16 for parameter in model.parameters())
    wide = any(q.spec.bits == 16 or q.spec.bits <= 4 or q.spec.has_blocks for q in quantizers)
    return _WIDE_OPSET if half or wide else None
