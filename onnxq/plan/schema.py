"""The keys of the plan's JSON and the types of their values. Arrays: `onnxq.plan.arrays`."""

from __future__ import annotations

from typing import Any, Literal

from onnxq.config import Frozen, Observer, Scheme
from onnxq.config.schema import Axis, Code, Finite, Natural, Opset, PassName, SchemaNumber, SiteName, Words
from onnxq.spec import ObserverSpec


class SpecRow(Frozen):
    """A QuantSpec in the words of the configuration. type: the ONNX type that holds the values."""

    bits: Natural
    type: Literal["int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "float8e4m3fn"]
    scheme: Scheme
    granularity: Literal["tensor", "channel", "block"]
    axis: Axis | None = None
    block_size: Natural | None = None
    narrow_range: bool = False
    dynamic: bool = False


class SiteRef(Frozen):
    """The name of a site: a tensor's, or [node, number of its input]."""

    site: SiteName
    scope: str = ""


class SiteRow(Frozen):
    """A SitePlan. computed_for: the spec of scale and zero_point, as `onnxq.plan.arrays.write_mark` wrote it."""

    site: SiteName
    scope: str = ""
    role: Literal["activation", "weight", "bias", "output"]
    spec: SpecRow
    # Arrays, in either form of `onnxq.plan.arrays`; so are `values` here and in the rows below.
    scale: Any = None
    zero_point: Any = None
    origin: str = ""
    computed_for: str = ""
    observer: Observer = ObserverSpec()
    rule: str = ""
    reason: str = ""
    consumers: tuple[SiteRef, ...] | None = None
    bound: tuple[Finite | None, Finite | None] = (None, None)
    clip: tuple[Finite | None, Finite | None] = (None, None)
    derived: tuple[SiteRef, SiteRef] | None = None
    group: str = ""
    tensor: str = ""
    # Apart from the name, which may hold "::" itself.
    tensor_scope: str = ""
    anchor: str = ""
    dequantize: str = ""
    values: Any = None
    sum_orders: tuple[tuple[Natural | tuple[Natural, ...], ...], ...] = ()


class RefusalRow(Frozen):
    """A Refusal."""

    subject: str
    reason: str
    fix: str = ""
    rule: str = ""
    code: Code = "R100"


class LeftFloatRow(Frozen):
    """A LeftFloat."""

    subject: str
    reason: str
    rule: str = ""
    code: Code = "F102"


class WarningRow(Frozen):
    """A Caution."""

    code: Code
    text: str


class ScalingRow(Frozen):
    """A Scaling, under `pass` the name of the pass that made it, or a Rotation, which has a size."""

    name: PassName
    tensor: str
    scope: str = ""
    anchor: str = ""
    factors: Any = None
    seed: Natural = 0
    size: Natural | None = None


class BiasRow(Frozen):
    """A BiasPlan: the input that reads it, and its values."""

    site: SiteName
    scope: str = ""
    values: Any


class PlacementRow(Frozen):
    """A PlacementChoice."""

    method: Literal["rules", "measured"]
    cpu: str = ""
    candidate: str = ""
    threads: Natural = 0
    speedups: dict[str, Finite] | None = None


class AttentionRow(Frozen):
    """An AttentionChoice; a figure that is not there is infinite, which JSON cannot say."""

    kind: Literal["float", "quantized"]
    float_db: Finite | None = None
    quantized_db: Finite | None = None
    samples: Natural


class KeptRow(Frozen):
    """A KeptFloat32."""

    node: str
    reason: Literal[
        "overflow",
        "sum",
        "small",
        "precision",
        "scale",
        "existing",
        "kernel",
        "onnx",
        "shapes",
        "rule",
        "unseen",
        "casts",
        "trial",
    ]
    figure: Finite = 0.0
    detail: str = ""


class PrecisionRow(Frozen):
    """A PrecisionPlan."""

    type: Literal["float32", "float16", "bfloat16"]
    nodes: Natural = 0
    kept: tuple[KeptRow, ...] = ()
    limited: tuple[SiteRef, ...] = ()
    io: Literal["float32", "float16", "bfloat16"] | None = None


class FeedRow(Frozen):
    """A Feed."""

    dtype: Literal[
        "float16",
        "float32",
        "float64",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "bool",
    ]
    shape: tuple[Natural, ...]
    low: int = 0
    high: int = 0


class NodeRow(Frozen):
    """A NodeContents."""

    op_type: str
    inputs: tuple[str, ...]
    output: str
    turned: bool = False


class ContentsRow(Frozen):
    """The Contents. tensors: size and figures of each in one text."""

    topology: str
    feeds: dict[str, FeedRow]
    tensors: dict[str, str]
    nodes: dict[str, NodeRow]


class PlanFile(Frozen):
    """A Plan."""

    version: SchemaNumber
    target: Literal["ort", "trt", "virtual"]
    model: str
    topology: str
    weights: str
    opset: Opset = 13
    prepare: tuple[str, ...] = ()
    data: str = ""
    placement: PlacementRow | None = None
    attention: AttentionRow | None = None
    warnings: tuple[WarningRow, ...] = ()
    kept: tuple[str, ...] = ()
    float_nodes: tuple[str, ...] = ()
    refusals: tuple[RefusalRow, ...] = ()
    left_float: tuple[LeftFloatRow, ...] = ()
    sites: tuple[SiteRow, ...] = ()
    nodes: Words
    scalings: tuple[ScalingRow, ...] = ()
    biases: tuple[BiasRow, ...] = ()
    lasting: bool = False
    nbits: Literal[0, 1, 2, 3, 4] | None = None
    saturation: Literal["avoid", "allow"] = "avoid"
    existing: tuple[SiteRow, ...] = ()
    precision: PrecisionRow | None = None
    contents: ContentsRow | None = None
