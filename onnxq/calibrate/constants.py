"""Scales and zero points of constants: of weights by their values, of biases by those of others.

Each weight is read, searched and let go of, here or by the workers of a crew. A large weight is a piece of work, and
small neighbours share one, whoever does it: so the numbers are the same.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np

from onnxq.arrays import Array, Floats, Shape, are_finite, as_float32, hash_parts, part_by_size
from onnxq.errors import CalibrationError, ConfigError, OnnxqError, PlanError
from onnxq.graph import FLOAT_TENSORS, LAYOUT_OPS, GraphIndex, NodeRef, is_large_model
from onnxq.graph.storage import Spool, StoredArray
from onnxq.numerics import bias_qparams, dequantize, floor_weight_scale, quantize, weight_qparams
from onnxq.numerics.weights import fake_quant_weight, find_saturating_sums, quantize_weight
from onnxq.plan import SitePlan
from onnxq.progress import Progress, silent
from onnxq.runtime.crew import AnyArray, Crew, hash_array, open_array
from onnxq.sites import Edge, Site, TensorId
from onnxq.spec import QParams
from onnxq.wording import join_names
from onnxq.workers import WorkPiece

Numbers = Mapping[Site, QParams]
# Operators that add up products of their inputs 0 to 2 but for a bias: an infinite weight makes NaN of a zero.
_PRODUCTS = {
    "Conv": 2,
    "ConvTranspose": 2,
    "Einsum": 2,
    "GRU": 3,
    "Gemm": 2,
    "LSTM": 3,
    "MatMul": 2,
    "RNN": 3,
}
# Operators that make NaN of a NaN in any of their inputs, whatever the other values are.
_SPREADING = _PRODUCTS.keys() | {
    "Add",
    "BatchNormalization",
    "Div",
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "Mul",
    "PRelu",
    "RMSNormalization",
    "Sub",
}
_MOVING = LAYOUT_OPS | {"Cast", "Expand"}


def find_tensor(index: GraphIndex, site: Site) -> TensorId:
    """The tensor that a site quantizes. Raises PlanError where the model does not have it."""
    tensor = index.find_at(site)
    if tensor is not None and index.resolve_tensor(tensor.name, tensor.scope) == tensor:
        return tensor
    missing = "the model has no such tensor"
    cause = missing if tensor is not None else "this input is not connected in the model"
    raise PlanError(site, cause, "plan this model again", code="Q404")


def check_constants(index: GraphIndex) -> None:
    """Raise CalibrationError for the first weight with a value that makes NaN on every sample.

    Infinities are legal where they are added, as in masks, or divided by, and any value where it may not be used, as in
    Where and Gather.
    """
    known = {}
    for node in index.nodes:
        if not node.is_onnx(*_SPREADING):
            continue
        for k in range(len(node.inputs)):
            # The constant that the input is, moved or converted.
            origins = index.walk_back(index.find_input(node, k), _MOVING)
            tensor = next(filter(index.is_constant, origins), None)
            if tensor is None or index.find_dtype(tensor) not in FLOAT_TENSORS:
                continue
            if tensor not in known:
                known[tensor] = _count_broken(index, tensor)
            nans, infinities = known[tensor]
            if nans or (infinities and k < _PRODUCTS.get(node.op_type, 0)):
                counts = " and ".join(
                    f"{count} {kind}"
                    for count, kind in ((nans, "NaN"), (infinities, "inf"))
                    if count
                )
                cause = f"is a weight of {node.title} and holds {counts}"
                raise CalibrationError(tensor, cause, "repair the float model", code="Q503")


def _count_broken(index: GraphIndex, tensor: TensorId) -> tuple[int, int]:
    """The numbers of NaN and of infinities in a constant."""
    value = index.find_constant(tensor)
    if value is None or not value.size:
        return 0, 0
    # They show in the least and greatest value, for which nothing is allocated.
    with np.errstate(invalid="ignore"):
        if np.isfinite(value.min()) and np.isfinite(value.max()):
            return 0, 0
    return int(np.isnan(value).sum()), int(np.isinf(value).sum())


def bias_numbers(
    index: GraphIndex, missing: Iterable[SitePlan], known: Numbers
) -> dict[Site, QParams]:
    """Scales and zero points of the missing bias sites whose input and weight have theirs."""
    qparams = {}
    for site in missing:
        if not site.role.is_bias:
            continue
        if site.derived is None:
            raise PlanError(
                site.name,
                "a bias needs the activation and the weight it derives from",
                "plan again",
                code="Q403",
            )
        x, w = site.derived
        if x in known and w in known:
            count = read_constant(index, site).size
            with name_site(site.name):
                qparams[site.site] = bias_qparams(known[x], known[w], count)
    return qparams


def read_constant(index: GraphIndex, site: SitePlan) -> Array:
    """The values of the constant that a site quantizes. Raises PlanError where it is none."""
    value = locate_constant(index, site)
    return value.map() if isinstance(value, StoredArray) else value


def locate_constant(index: GraphIndex, site: SitePlan) -> Array | StoredArray:
    """The same, or where they lie in a file."""
    value = index.locate_constant(find_tensor(index, site.site))
    if value is None:
        raise PlanError(
            site.name,
            f"is not a constant, as a {site.role} must be",
            "plan this model again",
            code="Q404",
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


# Where each has its scale, and its bias if it has one.
_NORMS = {
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}
# Operators that may stand between the normalization and its reader, and leave channels where they are.
_PASSING = frozenset({"Cast", "Identity"})
# Share of the mean power that every channel has at least, so that none is rounded without regard to it.
_LEAST = 1e-3


def estimate_importance(index: GraphIndex, site: SitePlan, shape: Shape) -> Floats | None:
    """Weighting of the squared errors of a weight, of mean 1, which broadcasts to its shape; None for equal weights.

    It is the mean of those of the readers; one whose channels' power is not known counts as equal.
    """
    edges = site.named_consumers
    weightings = [_weigh_input(index, edge, shape) for edge in edges] if len(shape) == 2 else []
    if all(weighting is None for weighting in weightings):
        return None
    ones = np.ones((1, 1), np.float32)
    total = sum(ones if weighting is None else weighting for weighting in weightings)
    return as_float32(total / np.float32(len(edges)))


def _weigh_input(index: GraphIndex, edge: Edge, shape: Shape) -> Floats | None:
    node = index.find_node(edge.node)
    if node.op_type not in ("MatMul", "Gemm") or edge.index != 1 or node.transposes_data:
        return None
    axis = 1 if node.is_transposed else 0
    maker = index.find_producer(index.find_origin(index.find_input(node), _PASSING))
    power = None if maker is None else _read_power(index, maker)
    if (
        power is None
        or power.shape != (shape[axis],)
        or not are_finite(power)
        # Equal for all channels it weighs nothing.
        or not np.ptp(power)
    ):
        return None
    return np.expand_dims(as_float32(np.maximum(power / power.mean(), _LEAST)), 1 - axis)


def _read_power(index: GraphIndex, node: NodeRef) -> Array | None:
    """Power of each channel of a normalization's output; a product with a vector is one, as exporters write it."""
    # An RMSNorm that is written out ends in a Mul by its factors.
    if node.op_type == "Mul":
        factors = [index.input_value(node, k) for k in (0, 1)]
        values = [value for value in factors if value is not None and value.ndim == 1][:1]
    else:
        parts = [index.input_value(node, k) for k in _NORMS.get(node.op_type, ())]
        values = (
            [value for value in parts if value is not None]
            if parts and parts[0] is not None
            else []
        )
    # Normalized values have power 1 and mean 0: times a factor, plus a shift, factor² + shift².
    squares = [np.square(value, dtype=np.float64) for value in values]
    return np.asarray(sum(squares)) if squares else None


# Megabytes of float values that small weights share a piece up to: a second's search at most.
_PIECE_MB = 16


@dataclass(frozen=True, eq=False)
class WeightTask:
    """One weight to be searched. importance: as of `weight_qparams`."""

    site: SitePlan
    values: AnyArray
    importance: Floats | None


def weight_numbers(
    index: GraphIndex,
    missing: Sequence[SitePlan],
    biases: Iterable[SitePlan],
    known: Numbers,
    progress: Progress = silent,
    crew: Crew | None = None,
) -> dict[Site, QParams]:
    """Scales and zero points of the missing weight sites.

    missing: sites without numbers, of any role. biases: sites whose scale derives from weights. known: numbers that
    there are, activations included. crew: searches the weights; the result does not depend on it.
    Raises PlanError where a weight is no constant, CalibrationError for NaN or inf in it.
    """
    weights = [site for site in missing if site.role.is_weight]
    qparams = dict(_search_weights(index, weights, crew or Crew(), progress)) if weights else {}
    for bias in biases:
        if bias.derived is None:
            continue
        x, w = bias.derived
        # A bias on a scale too small for it would overflow int32, so the weight's scale is raised.
        if w in qparams and x in known:
            value = read_constant(index, bias)
            with name_site(bias.name):
                scale = floor_weight_scale(qparams[w].scale, known[x].scale, value)
            qparams[w] = replace(qparams[w], scale=scale)
    first: dict[str, QParams] = {}
    for site in missing:
        # Of a weight and the table that it is the transpose of, the weight's scales serve both.
        if site.group and site.site in qparams:
            shared = first.setdefault(site.group, qparams[site.site])
            qparams[site.site] = replace(shared, computed_for=site.spec.levels)
    return qparams


def _search_weights(
    index: GraphIndex, weights: Sequence[SitePlan], crew: Crew, progress: Progress
) -> Iterator[tuple[Site, QParams]]:
    """Each site with its numbers. Steps name the tensor; they are megabytes of all.

    Of a large model the numbers go to a temporary file: scales of blocks of 32 weights are a quarter of their file.
    """
    spool = Spool() if is_large_model(index.proto) else None
    sizes = [_count_megabytes(index, site) for site in weights]
    # Alone in this process each weight is a step, so that its name is shown.
    groups = part_by_size(sizes, 0 if crew.plain else _PIECE_MB)
    with progress("scales of weights, MB", sum(sizes)) as task:
        pieces = []
        for group in groups:
            tasks = tuple(_describe_weight(index, site, crew) for site in weights[group])
            title = join_names((site.name for site in weights[group]), 1)
            key = ""
            # Hashes read every byte of the weights: only where a journal asks what is done already.
            if crew.workers.journal is not None:
                with progress(f"hashing weights: {title}"):
                    key = _hash_tasks(
                        tasks, [locate_constant(index, site) for site in weights[group]]
                    )
            pieces.append(WorkPiece(title, tasks, key))
        results = crew.map(search_piece, pieces)
        for group, piece in zip(groups, pieces, strict=True):
            size = sum(sizes[group])
            with progress(f"scales of weights: {piece.title}, {size} MB"):
                searched = next(results)
            for site, qparams in zip(weights[group], searched, strict=True):
                if spool is not None:
                    scale, zero = (
                        spool.write(part).map() for part in (qparams.scale, qparams.zero_point)
                    )
                    qparams = replace(qparams, scale=scale, zero_point=zero)
                yield site.site, qparams
            task.advance(size)


def search_piece(tasks: Sequence[WeightTask]) -> list[QParams]:
    """The numbers of some weights, in order."""
    numbers = []
    for task in tasks:
        site = task.site
        values = open_array(task.values)
        with name_site(site.name):
            numbers.append(
                weight_qparams(
                    values,
                    site.spec,
                    observer=site.observer,
                    orders=site.sum_orders,
                    importance=task.importance,
                )
            )
    return numbers


def _count_megabytes(index: GraphIndex, site: SitePlan) -> int:
    """Of the float values; at least 1, so that small ones count too."""
    sizes = index.find_sizes(find_tensor(index, site.site)) or ()
    return max(1, 4 * math.prod(sizes) // 10**6)


def _describe_weight(index: GraphIndex, site: SitePlan, crew: Crew) -> WeightTask:
    values = locate_constant(index, site)
    importance = estimate_importance(index, site, values.shape)
    return WeightTask(site, crew.share_array(values), importance)


def _hash_tasks(tasks: Sequence[WeightTask], values: Sequence[Array | StoredArray]) -> str:
    """Of all that the numbers depend on; not of names."""
    # Another version of NumPy may sum, and so round, in another way.
    parts = [f"weights {version('onnxq')} {np.__version__}".encode()]
    for task, array in zip(tasks, values, strict=True):
        site = task.site
        about = (array.dtype, array.shape, site.spec, site.observer, site.sum_orders)
        parts += [
            repr(about).encode(),
            hash_array(array).encode(),
            b"" if task.importance is None else task.importance.tobytes(),
        ]
    return hash_parts(*parts)


def quantize_constant(site: SitePlan, qparams: QParams, value: Array) -> Array:
    """The quantized values of a weight (in its own shape) or a bias (as a vector), in the storage's numpy type.

    Values that the plan carries take the place of rounding to nearest. Raises PlanError where those do not fit, and
    where the scales do not.
    """
    if site.values is not None:
        return _check_values(site, value.shape)
    try:
        if site.role.is_bias:
            # A Gemm takes a bias of shape [1, N]; the integer kernels read [N] only.
            return quantize(value.ravel(), qparams, site.spec)
        return quantize_weight(value, qparams, site.spec, site.sum_orders)
    except OnnxqError as error:
        # numerics sees arrays only, so the site is named here.
        raise PlanError(
            f"{site.site}: {error.subject}", error.cause, error.fix, code=error.code
        ) from error


def dequantize_constant(site: SitePlan, constant: Array) -> Array:
    """A constant's real values once quantized: by the values of the site, else rounded to nearest."""
    if site.qparams is None:
        return constant
    if site.values is not None:
        return dequantize(site.values, site.qparams, site.spec)
    # A Gemm takes a bias of shape [1, N], whose scales lie along N.
    values = constant.ravel() if site.role.is_bias else constant
    real = fake_quant_weight(values, site.qparams, site.spec, site.sum_orders)
    return real.reshape(constant.shape)


def _check_values(site: SitePlan, shape: Shape) -> Array:
    """The quantized values that the plan carries, once they are found to be legal."""
    data = np.asarray(site.values)
    fits = data.shape == shape and data.dtype == site.spec.code_type
    if not fits or (data.size and (data.min() < site.spec.qmin or data.max() > site.spec.qmax)):
        cause = f"its values do not fit a {site.spec.storage} tensor of shape {list(shape)}"
        raise PlanError(
            site.name, cause, "take `values` out, or plan this model again", code="Q408"
        )
    if any(find_saturating_sums(data, order).any() for order in site.sum_orders):
        cause = "its values overflow 16-bit sums on CPUs without VNNI, and the plan says that they do not"
        raise PlanError(
            site.name, cause, "take `values` out, or write `saturation: allow`", code="Q408"
        )
    return data
