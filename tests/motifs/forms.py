"""Operators as older opsets write them: what is an input now was an attribute, or had another name, or was not yet."""

from collections.abc import Callable, Mapping

import numpy as np

Inputs = tuple[object, ...]
Form = tuple[str, Inputs, dict[str, object]]
_REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSumSquare",
)  # fmt: skip
# Inputs that were attributes before an opset, by their positions.
_ATTRIBUTES: dict[str, tuple[int, Mapping[int, str]]] = {
    **{kind: (18, {1: "axes"}) for kind in _REDUCTIONS},
    "ReduceSum": (13, {1: "axes"}),
    "Squeeze": (13, {1: "axes"}),
    "Unsqueeze": (13, {1: "axes"}),
    "Split": (13, {1: "split"}),
    "Dropout": (12, {1: "ratio"}),
    "Pad": (11, {1: "pads", 2: "value"}),
    "Clip": (11, {1: "min", 2: "max"}),
    "Slice": (10, {1: "starts", 2: "ends", 3: "axes"}),
    "TopK": (10, {1: "k"}),
}
_NUMBERS = ("ratio", "value", "min", "max", "k")
_NEGATIVE_AXES = 11


class NoForm(Exception):
    """The opset has no way to write this."""


def write_form(opset: int, kind: str, inputs: Inputs, attributes: Mapping[str, object]) -> Form:
    """The operator, its inputs and attributes as this opset writes them; they are given as opset 18 does."""
    form = kind, inputs, dict(attributes)
    if kind in _ATTRIBUTES and opset < _ATTRIBUTES[kind][0]:
        form = _write_attributes(form, _ATTRIBUTES[kind][1])
    if kind in _OTHERS:
        form = _OTHERS[kind](opset, *form)
    return _write_axes(form) if opset < _NEGATIVE_AXES else form


def _write_attributes(form: Form, names: Mapping[int, str]) -> Form:
    kind, inputs, attributes = form
    for position, name in names.items():
        value = inputs[position] if position < len(inputs) else ""
        if isinstance(value, np.ndarray):
            attributes[name] = value.item() if name in _NUMBERS else value.tolist()
        elif value != "":
            raise NoForm(f"{kind} whose {name} is computed")
    rest = inputs[max(names) + 1 :]
    if rest and kind != "Dropout":  # which is not training in any case
        raise NoForm(f"{kind} with {len(inputs)} inputs")
    return kind, inputs[:1], attributes


def _write_axes(form: Form) -> Form:
    """Axes counted from the front."""
    kind, inputs, attributes = form
    for name in ("axis", "axes"):
        value = attributes.get(name, 0)
        axes = list(value) if isinstance(value, list) else [value]
        if min(axes) < 0:
            shape = getattr(inputs[0], "shape", None)
            if shape is None:
                raise NoForm(f"{kind} with a negative axis of who knows how many")
            rank = len(shape) + (not isinstance(inputs[0], np.ndarray))
            axes = [axis % rank for axis in axes]
            attributes[name] = axes if isinstance(value, list) else axes[0]
    return kind, inputs, attributes


def _write_resize(opset: int, kind: str, inputs: Inputs, attributes: dict[str, object]) -> Form:
    source, region, scales, *sizes = inputs
    if opset >= 13:
        return kind, inputs, attributes
    if opset >= 11:
        # Neither was optional.
        empty = np.zeros(0, np.float32)
        return (
            kind,
            (source, empty if isinstance(region, str) else region, empty if sizes else scales, *sizes),
            attributes,
        )
    if sizes or region != "":
        raise NoForm("Resize to sizes")
    mode = {"mode": attributes["mode"]}
    if opset == 10:
        return kind, (source, scales), mode
    if opset == 9:
        return "Upsample", (source, scales), mode
    if not isinstance(scales, np.ndarray):
        raise NoForm("Upsample with scales that are computed")
    return "Upsample", (source,), {**mode, "scales": scales.tolist()}


def _write_gemm(opset: int, kind: str, inputs: Inputs, attributes: dict[str, object]) -> Form:
    if opset < 11 and len(inputs) == 2:
        inputs = (*inputs, np.zeros(1, np.float32))
    return kind, inputs, attributes


def _write_scatter(opset: int, kind: str, inputs: Inputs, attributes: dict[str, object]) -> Form:
    return kind if opset >= 11 else "Scatter", inputs, attributes


def _write_depth(opset: int, kind: str, inputs: Inputs, attributes: dict[str, object]) -> Form:
    if opset < 11 and attributes.pop("mode", "DCR") != "DCR":
        raise NoForm("DepthToSpace by columns and rows")
    return kind, inputs, attributes


_OTHERS: dict[str, Callable[[int, str, Inputs, dict[str, object]], Form]] = {
    "Resize": _write_resize,
    "Gemm": _write_gemm,
    "ScatterElements": _write_scatter,
    "DepthToSpace": _write_depth,
}
