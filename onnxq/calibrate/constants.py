"""Constants of a model, whether they are numbers, and scales and zero points of biases, which derive from others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.errors import CalibrationError, ConfigError, OnnxqError, PlanError
from onnxq.graph import GraphIndex, NodeRef
from onnxq.graph.stored import StoredArray
from onnxq.numerics import bias_qparams
from onnxq.plan import SitePlan
from onnxq.sites import Role, Site, TensorId
from onnxq.spec import QParams

Numbers = Mapping[Site, QParams]
# Operators that add up products of their inputs 0 to 2 but for a bias: an infinite weight makes NaN of a zero.
_PRODUCTS = {"Conv": 2, "ConvTranspose": 2, "Einsum": 2, "GRU": 3, "Gemm": 2, "LSTM": 3, "MatMul": 2, "RNN": 3}
# Operators that make NaN of a NaN in any of their inputs, whatever the other values are.
_SPREADING = _PRODUCTS.keys() | {
    "Add", "BatchNormalization", "Div", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "Mul",
    "PRelu", "RMSNormalization", "Sub",
}  # fmt: skip
_MOVING = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
_FLOATS = frozenset((TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE))


def find_tensor(index: GraphIndex, site: Site) -> TensorId:
    """The tensor that a site quantizes. Raises PlanError where the model does not have it."""
    if isinstance(site, TensorId):
        if index.resolve(site.name, site.scope) != site:
            raise PlanError(str(site), "the model has no such tensor", "plan this model again", code="Q404")
        return site
    node = index.node(site.node)
    name = node.inputs[site.index] if site.index < len(node.inputs) else ""
    found = index.resolve(name, node.scope)
    if found is None:
        raise PlanError(str(site), "this input is not connected in the model", "plan this model again", code="Q404")
    return found


def check_constants(index: GraphIndex) -> None:
    """Raise CalibrationError for the first weight with a value that makes NaN on every sample.

    Infinities are legal where they are added, as in masks, or divided by, and any value where it may not be used, as in
    Where and Gather.
    """
    known: dict[TensorId, tuple[int, int]] = {}
    for node in index.nodes:
        if node.domain or node.op_type not in _SPREADING:
            continue
        for k in range(len(node.inputs)):
            tensor = _find_origin(index, node, k)
            if tensor is None or index.dtype(tensor) not in _FLOATS:
                continue
            if tensor not in known:
                known[tensor] = _count_broken(index, tensor)
            nans, infinities = known[tensor]
            if nans or (infinities and k < _PRODUCTS.get(node.op_type, 0)):
                counts = " and ".join(
                    f"{count} {kind}" for count, kind in ((nans, "NaN"), (infinities, "inf")) if count
                )
                cause = f"is a weight of {node.name} ({node.op_type}) and holds {counts}"
                raise CalibrationError(str(tensor), cause, "repair the float model", code="Q503")


def _find_origin(index: GraphIndex, node: NodeRef, k: int) -> TensorId | None:
    """The constant that input k of a node is, moved or converted; None for another input."""
    tensor = index.input(node, k)
    while tensor is not None and not index.is_constant(tensor):
        maker = index.producer(tensor)
        moved = maker is not None and not maker.domain and maker.op_type in _MOVING
        tensor = index.input(maker, 0) if maker is not None and moved else None
    return tensor


def _count_broken(index: GraphIndex, tensor: TensorId) -> tuple[int, int]:
    """The numbers of NaN and of infinities in a constant."""
    value = index.constant(tensor)
    if value is None or not value.size:
        return 0, 0
    # They show in the least and greatest value, for which nothing is allocated.
    with np.errstate(invalid="ignore"):
        if np.isfinite(value.min()) and np.isfinite(value.max()):
            return 0, 0
    return int(np.isnan(value).sum()), int(np.isinf(value).sum())


def bias_numbers(index: GraphIndex, missing: Iterable[SitePlan], numbers: Numbers) -> dict[Site, QParams]:
    """Scales and zero points of the missing bias sites whose input and weight have theirs."""
    found: dict[Site, QParams] = {}
    for site in missing:
        if site.role is not Role.BIAS:
            continue
        if site.derived is None:
            raise PlanError(
                str(site.site), "a bias needs the activation and the weight it derives from", "plan again", code="Q403"
            )
        x, w = site.derived
        if x in numbers and w in numbers:
            count = read_constant(index, site).size
            with name_site(str(site.site)):
                found[site.site] = bias_qparams(numbers[x], numbers[w], count)
    return found


def read_constant(index: GraphIndex, site: SitePlan) -> NDArray[Any]:
    """The values of the constant that a site quantizes. Raises PlanError where it is none."""
    value = locate_constant(index, site)
    return value.map() if isinstance(value, StoredArray) else value


def locate_constant(index: GraphIndex, site: SitePlan) -> NDArray[Any] | StoredArray:
    """The same, or where they lie in a file."""
    value = index.locate_constant(find_tensor(index, site.site))
    if value is None:
        raise PlanError(
            str(site.site), f"is not a constant, as a {site.role} must be", "plan this model again", code="Q404"
        )
    return value


@contextmanager
def name_site(site: str) -> Iterator[None]:
    """Name the site in an error of numerics, which sees arrays only."""
    try:
        yield
    except ConfigError as error:
        # Its subject is the setting at fault.
        raise error.replace_text(subject=f"{site}: {error.subject}") from error
    except OnnxqError as error:
        raise error.replace_text(subject=site) from error
