"""Quantization of a tensor: its spec (QuantSpec) and the numbers that follow (QParams).

A spec is frozen, hashable and holds no arrays; numbers live in QParams only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

from onnxq.errors import ConfigError
from onnxq.wording import Word

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from onnxq.arrays import Floats


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor; scale and zero_point have shape []."""

    # In configurations, plans and metadata.
    word: ClassVar[str] = "tensor"

    @property
    def attributes(self) -> dict[str, int]:
        """Of a pair in the file, and in plans."""
        return {}


@dataclass(frozen=True)
class PerChannel:
    """One scale per index of `axis`; scale and zero_point have shape [channels]."""

    word: ClassVar[str] = "channel"
    axis: int

    @property
    def attributes(self) -> dict[str, int]:
        """Of a pair in the file, and in plans."""
        return {"axis": self.axis}


@dataclass(frozen=True)
class PerBlock:
    """One scale per `size` consecutive elements along `axis` (ONNX opset 21 blocked quantization).

    scale and zero_point have the tensor's rank, with ceil(dim / size) at `axis`.
    """

    word: ClassVar[str] = "block"
    axis: int
    size: int

    @property
    def attributes(self) -> dict[str, int]:
        """Of a pair in the file, and in plans."""
        return {"axis": self.axis, "block_size": self.size}


Granularity = PerTensor | PerChannel | PerBlock


def make_granularity(axis: int | None, size: int | None) -> Granularity:
    """Blocks of `size` elements along the axis, its channels without a size, and the whole tensor without an axis."""
    if axis is None:
        return PerTensor()
    return PerBlock(axis, size) if size else PerChannel(axis)


def describe_granularity(grain: Granularity) -> str:
    """The parts that have a scale each, in words that follow others; "" for one scale."""
    if isinstance(grain, PerBlock):
        return f" per {grain.size} of axis {grain.axis}"
    return f" per channel {grain.axis}" if isinstance(grain, PerChannel) else ""


# Bits that a quantized value may have.
WIDTHS = (2, 3, 4, 5, 6, 7, 8, 16, 32)
# ONNX type -> (width in bits, signed).
STORAGE_BITS = {
    "int2": (2, True),
    "uint2": (2, False),
    "int4": (4, True),
    "uint4": (4, False),
    "int8": (8, True),
    "uint8": (8, False),
    "int16": (16, True),
    "uint16": (16, False),
    "int32": (32, True),
    "float8e4m3fn": (8, True),
}
# FP8 E4M3 "fn" has no infinities; its largest finite value is 448 (ONNX, float8 types).
FLOAT8 = "float8e4m3fn"
_FLOAT8_MAX = 448
_ROW_BLOCKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class ElementType:
    """A type of tensor elements: its width in bits, whether it has negative values, whether it is a float."""

    bits: int
    signed: bool = True
    is_float: bool = False


# ONNX's types by their names in lower case: those of QuantSpec, then those that files of other tools hold as well.
ELEMENT_TYPES = {
    **{
        name: ElementType(bits, signed, name == FLOAT8)
        for name, (bits, signed) in STORAGE_BITS.items()
    },
    "uint32": ElementType(32, signed=False),
    "int64": ElementType(64),
    "uint64": ElementType(64, signed=False),
    "float4e2m1": ElementType(4, is_float=True),
    "float6e2m3": ElementType(6, is_float=True),
    "float6e3m2": ElementType(6, is_float=True),
    "float8e4m3fnuz": ElementType(8, is_float=True),
    "float8e5m2": ElementType(8, is_float=True),
    "float8e5m2fnuz": ElementType(8, is_float=True),
    "float8e8m0": ElementType(8, signed=False, is_float=True),
    "float16": ElementType(16, is_float=True),
    "bfloat16": ElementType(16, is_float=True),
    "float": ElementType(32, is_float=True),
    "double": ElementType(64, is_float=True),
}


def name_int(bits: int, *, signed: bool) -> str:
    """The type of integers of so many bits, as int8 or uint4."""
    return f"{'' if signed else 'u'}int{bits}"


def find_element_type(name: str) -> ElementType:
    """The type of this name, in lower case; a signed byte for a name that ONNX does not know, or "" for none."""
    return ELEMENT_TYPES.get(name, ElementType(8))


def find_numpy_storage(storage: str) -> str:
    """The type that numpy, and an engine that unpacks them, hold the values of an ONNX type in: a byte for 2 or 4."""
    return {"int2": "int8", "uint2": "uint8", "int4": "int8", "uint4": "uint8"}.get(
        storage, storage
    )


class FloatType(Word):
    """A float type that a network computes in."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def onnx_type(self) -> int:
        """Its number as an onnx.TensorProto dtype."""
        return {"float32": 1, "float16": 10, "bfloat16": 16}[self.value]

    @property
    def largest(self) -> float:
        """Its largest finite number."""
        return 65504.0 if self is FloatType.FLOAT16 else 3.3e38

    @property
    def smallest(self) -> float:
        """Its smallest normal number; below it digits are lost one by one."""
        return 2.0**-14 if self is FloatType.FLOAT16 else 2.0**-126


# By their numbers in ONNX.
FLOAT_TYPES = {kind.onnx_type: kind for kind in FloatType}


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Bits, sign, scheme and granularity of one quantized tensor."""

    # 2-8 and 16; 32 for a derived bias.
    bits: int = 8
    signed: bool = True
    # zero_point is 0 for signed and 2**(bits-1) for unsigned types.
    symmetric: bool = True
    # Drops the lowest value of a signed type (int8: -127..127).
    narrow_range: bool = False
    granularity: Granularity = PerTensor()
    # ONNX type that holds the values; "" for the narrowest of int8/uint8/int16/uint16/int32 that fits. "int4" and
    # "uint4" are the packed types of opset 21, "int2" and "uint2" those of 25. "float8e4m3fn" is FP8 E4M3 (opset 19),
    # whose values are not evenly spaced: a scale, no zero point, saturation at +-448.
    storage: str = ""
    # Scale and zero point are computed at each run, by ONNX's DynamicQuantizeLinear; there are no QParams.
    dynamic: bool = False
    # No value is below 0, and a third of the levels are: a kernel writes there what an activation would clamp, and a
    # Max on the integers clamps it.
    footroom: bool = False
    # The least width of the range that scale and zero point are for.
    min_range: float = 0.0

    def __post_init__(self) -> None:
        bits = self.bits
        if bits not in WIDTHS:
            self._refuse_spec(
                f"bits={bits}", "bit width must be 2-8, 16 or 32", "choose one of these"
            )
        if not self.storage:
            container = max(8, bits)
            # The only way to set a field of a frozen dataclass.
            object.__setattr__(self, "storage", name_int(container, signed=self.signed))
        subject = f"storage={self.storage!r}"
        if not self._fits_storage(self.storage):
            fitting = [name for name in STORAGE_BITS if name != FLOAT8 and self._fits_storage(name)]
            fix = f"use one of {', '.join(fitting)}"
            sign = "signed" if self.signed else "unsigned"
            self._refuse_spec(subject, f"cannot hold {bits}-bit {sign} values", fix)
        if self.is_float and (bits != 8 or not self.symmetric or self.narrow_range):
            cause = "is 8 bits, symmetric and takes no narrow_range"
            self._refuse_spec(
                subject, cause, "ask for bits: 8 and scheme: symmetric, or for an integer type"
            )
        one_byte = (
            self.storage == "uint8" and bits == 8 and not self.symmetric and self.has_one_scale
        )
        if self.dynamic and not one_byte:
            cause = (
                "DynamicQuantizeLinear makes 8-bit asymmetric uint8, with one scale for the tensor"
            )
            fix = "leave bits, scheme, signed and granularity as they are in ort-dynamic"
            self._refuse_spec("dynamic: true", cause, fix)

    def _fits_storage(self, storage: str) -> bool:
        width, signed = STORAGE_BITS.get(storage, (0, False))
        return width >= self.bits and signed == self.signed

    def _refuse_spec(self, subject: str, cause: str, fix: str) -> NoReturn:
        raise ConfigError(subject, cause, fix, code="Q313")

    @property
    def is_float(self) -> bool:
        """True for FP8, whose quantized values are floats."""
        return self.storage == FLOAT8

    @property
    def qmin(self) -> int:
        """Lowest quantized value."""
        if self.is_float:
            return -_FLOAT8_MAX
        if not self.signed:
            return 0
        return int(self.narrow_range) - (1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        """Highest quantized value."""
        if self.is_float:
            return _FLOAT8_MAX
        return (1 << (self.bits - int(self.signed))) - 1

    @property
    def scheme(self) -> str:
        """The scheme in the words of the configuration."""
        return "symmetric" if self.symmetric else "asymmetric"

    @property
    def kind(self) -> str:
        """The type of as many bits as the values have, as int5; the storage may be a wider one."""
        return self.storage if self.is_float else name_int(self.bits, signed=self.signed)

    @property
    def levels(self) -> str:
        """Text of all fields that scale and zero point depend on; the storage type, which may be wider, is none."""
        grain = describe_granularity(self.granularity)
        if self.is_float:
            return f"{self.storage}{grain}"
        sign = "signed" if self.signed else "unsigned"
        if self.dynamic:
            return "computed at each run"
        narrow = " narrow" if self.narrow_range else " footroom" if self.footroom else ""
        least = f" at least {self.min_range:g}" if self.min_range else ""
        return f"{self.bits} bits {sign} {self.scheme}{narrow}{least}{grain}"

    @property
    def has_one_scale(self) -> bool:
        """True where one scale serves the whole tensor."""
        return isinstance(self.granularity, PerTensor)

    @property
    def has_channels(self) -> bool:
        """True where each channel has a scale."""
        return isinstance(self.granularity, PerChannel)

    @property
    def has_blocks(self) -> bool:
        """True where each block along an axis has a scale."""
        return isinstance(self.granularity, PerBlock)

    @property
    def storage_bits(self) -> int:
        """Width of the container in bits."""
        return STORAGE_BITS[self.storage][0]

    @property
    def numpy_storage(self) -> str:
        """The integer type that numpy holds the values in: a byte for the packed types."""
        return find_numpy_storage(self.storage)

    @property
    def code_type(self) -> str:
        """The type that numpy holds quantized values and zero points in."""
        # FP8 has one zero point only, 0, which the graph editor casts to the storage.
        return "float32" if self.is_float else self.numpy_storage

    @property
    def has_rows(self) -> bool:
        """True for a matrix of which each row can be dequantized alone: int8 a row, int4 in blocks of one; around 0."""
        grain = self.granularity
        if isinstance(grain, PerBlock):
            # ONNX Runtime's GatherBlockQuantized takes powers of two from 16 on.
            return (
                self.symmetric
                and self.storage == "int4"
                and grain.axis == 1
                and grain.size in _ROW_BLOCKS
            )
        return self.symmetric and self.storage == "int8" and grain == PerChannel(0)

    @property
    def fills_storage(self) -> bool:
        """True when saturation of the storage type enforces [qmin, qmax]; narrow_range is not considered."""
        return self.bits == self.storage_bits

    @property
    def is_narrow(self) -> bool:
        """True where the storage type saturates beyond [qmin, qmax]."""
        return not self.fills_storage or self.narrow_range


# Origins of numbers that nothing is searched for: those that an engine demands, and those of a rule.
FIXED = "fixed by the engine"
RULED = "given by a rule"


@dataclass(frozen=True, eq=False)
class QParams:
    """Scale and zero point of one site, and their origin.

    Shapes follow the spec's granularity: [] per tensor, [C] per channel, the blocked shape per block.
    """

    # Above 0.
    scale: Floats
    # In [qmin, qmax].
    zero_point: NDArray[np.int32]
    # E.g. "minmax over 32 samples", "weights", "plan file", "TensorRT calibration cache".
    origin: str = ""
    # `QuantSpec.levels` of the spec they were computed for; "" for imported numbers, which hold for any spec.
    # Not part of equality.
    computed_for: str = ""
    # Of a weight from a checkpoint, where the quantized values stand beside it: blocks that begin at a float in the
    # place of a zero point, which is added; and, where blocks have its rows in another order, the row at each place.
    minimum: Floats | None = None
    order: NDArray[np.int32] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QParams):
            return NotImplemented
        # Here, since configurations have specs too, and --help waits for them.
        import numpy as np

        # None equals None, and no array.
        arrays = ("scale", "zero_point", "minimum", "order")
        same = (np.array_equal(getattr(self, name), getattr(other, name)) for name in arrays)
        return self.origin == other.origin and all(same)

    # Arrays do not hash; a dataclass with its own __eq__ would otherwise inherit object's hash.
    __hash__ = None  # type: ignore[assignment]


def describe_spec(spec: QuantSpec) -> str:
    """The spec in a few words: "8-bit asymmetric uint8 per tensor"."""
    grain = spec.granularity.word
    return describe_form(spec.bits, spec.scheme, spec.storage, grain, dynamic=spec.dynamic)


def describe_form(bits: int, scheme: str, storage: str, grain: str, *, dynamic: bool) -> str:
    """The words of `describe_spec`, of what is not in a spec. grain: tensor, channel or block."""
    return f"{'dynamic ' if dynamic else ''}{bits}-bit {scheme} {storage} per {grain}"


# Observers that weights have, and their options.
WEIGHT_OBSERVERS = {"minmax": (), "mse": ("signed_scales",)}
# A setting of an observer or a quantizer; several are sorted, by name.
Option = float | int | str | bool
NamedOptions = tuple[tuple[str, Option], ...]


@dataclass(frozen=True)
class ObserverSpec:
    """Name of the observer that finds a site's range, and its options as sorted (name, value) pairs."""

    name: str = "minmax"
    options: NamedOptions = ()

    @property
    def is_for_weights(self) -> bool:
        """True where weights have this observer, with these options."""
        known = WEIGHT_OBSERVERS.get(self.name)
        return known is not None and {key for key, _ in self.options} <= {*known}
