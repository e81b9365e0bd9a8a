"""The configuration's types: frozen, hashable, without arrays. Strings of the YAML are checked here and end here.

A wish says how a kind of tensor should be quantized; the target answers it with a spec or a Refusal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from onnxq.errors import ConfigError
from onnxq.sites import Role
from onnxq.spec import Granularity, ObserverSpec, PerBlock, PerChannel, PerTensor, QuantSpec

Bits = Literal[2, 3, 4, 5, 6, 7, 8, 16]
Scheme = Literal["symmetric", "asymmetric"]
Grain = Literal["tensor", "channel", "block"]
Storage = Literal["", "int4", "uint4", "int8", "uint8", "int16", "uint16", "float8e4m3fn"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _one_or_many(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _observer(value: Any) -> Any:
    if isinstance(value, str):
        return ObserverSpec(value)
    if not isinstance(value, Mapping):
        return value
    options = dict(value)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise PydanticCustomError("observer", "an observer is a name, or a mapping with `name` and its options")
    for key, option in options.items():
        if not isinstance(option, (bool, int, float, str)):
            raise PydanticCustomError(
                "observer",
                "option '{key}' must be a number, a word or true/false, not {kind}",
                {"key": str(key), "kind": type(option).__name__},
            )
    return ObserverSpec(name, tuple(sorted(options.items())))


def _plain_observer(spec: ObserverSpec) -> Any:
    return {"name": spec.name, **dict(spec.options)} if spec.options else spec.name


Observer = Annotated[ObserverSpec, BeforeValidator(_observer), PlainSerializer(_plain_observer)]


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str] | None:
    written = len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/")
    return re.compile(pattern[1:-1]) if written else None


def matches(patterns: str | Sequence[str], name: str) -> bool:
    """True when one of the patterns selects `name`, or when there are none.

    `/…/` is a regular expression that may match anywhere; everything else is a glob over the whole name,
    case-sensitive. A pattern equal to the name always matches, so names with brackets can be written as they are.
    """
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not wanted:
        return True
    for pattern in wanted:
        regex = _regex(pattern)
        if pattern == name or (regex.search(name) is not None if regex else fnmatchcase(name, pattern)):
            return True
    return False


def _checked_patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in value:
        if not pattern:
            raise ValueError("a pattern must not be empty")
        try:
            _regex(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return value


Patterns = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class QuantWish(_Frozen):
    """How one kind of tensor should be quantized; `spec` turns it into a QuantSpec.

    signed: None takes the scheme's usual type (symmetric: signed, asymmetric: unsigned).
    storage: "" takes the narrowest whole-byte type; "int4"/"uint4" the packed types of opset 21,
        "float8e4m3fn" FP8 (opset 19).
    """

    bits: Bits = 8
    scheme: Scheme = "symmetric"
    signed: bool | None = None
    narrow_range: bool = False
    granularity: Grain = "tensor"
    block_size: int | None = Field(default=None, ge=2)
    storage: Storage = ""
    observer: Observer = ObserverSpec()

    @model_validator(mode="after")
    def _consistent(self) -> QuantWish:
        if self.granularity == "block" and self.block_size is None:
            raise ValueError("granularity 'block' needs a block_size")
        if self.granularity != "block" and self.block_size is not None:
            raise ValueError(f"block_size is only for granularity 'block', not {self.granularity!r}")
        if self.narrow_range and not self.is_signed:
            raise ValueError("narrow_range drops the lowest level of a signed type; this one is unsigned")
        try:
            self.spec(0)
        except ConfigError as error:
            raise ValueError(f"{error.subject} {error.cause}; {error.fix}") from error
        return self

    @property
    def is_signed(self) -> bool:
        """The sign asked for, or the scheme's usual one."""
        return self.scheme == "symmetric" if self.signed is None else self.signed

    def spec(self, axis: int | None) -> QuantSpec:
        """The QuantSpec for a tensor whose channel (or block) axis is `axis`.

        Raises ConfigError when the granularity needs an axis and the tensor has none.
        """
        grain: Granularity = PerTensor()
        if self.granularity != "tensor":
            if axis is None:
                raise ConfigError(
                    f"granularity {self.granularity!r}",
                    "this tensor has no channel axis",
                    "ask for granularity: tensor",
                )
            grain = PerChannel(axis) if self.block_size is None else PerBlock(axis, self.block_size)
        return QuantSpec(
            bits=self.bits,
            signed=self.is_signed,
            symmetric=self.scheme == "symmetric",
            narrow_range=self.narrow_range,
            granularity=grain,
            storage=self.storage,
        )


class RuleSet(_Frozen):
    """What a rule changes: fields of a wish, `float: true` to leave the tensor unquantized, or `quantize: true` to
    quantize where the target's size rules would leave the node float because it does not get faster.
    """

    bits: Bits | None = None
    scheme: Scheme | None = None
    signed: bool | None = None
    narrow_range: bool | None = None
    granularity: Grain | None = None
    block_size: int | None = Field(default=None, ge=2)
    storage: Storage | None = None
    observer: Observer | None = None
    quantize: bool = False
    float: bool = False

    @model_validator(mode="after")
    def _says_something(self) -> RuleSet:
        given = [*self.given(), *(["quantize"] if self.quantize else [])]
        if not self.float and not given:
            raise ValueError(
                "sets nothing; give bits, scheme, granularity, observer …, `quantize: true` or `float: true`"
            )
        if self.float and given:
            raise ValueError(f"`float: true` leaves nothing to quantize, so {', '.join(given)} cannot be set with it")
        return self

    def given(self) -> dict[str, Any]:
        """The wish fields this rule sets."""
        return {k: v for k in QuantWish.model_fields if (v := getattr(self, k)) is not None}


class Rule(_Frozen):
    """Selectors (all given ones must hold; several patterns of one selector are alternatives) and what they set.

    between: (a, b): every node on a path from tensor-or-node a to tensor-or-node b, both ends included.
    line: where the rule was written; 0 when it came from Python. source: file or preset it came from.
    """

    node: Patterns = ()
    op: Patterns = ()
    tensor: Patterns = ()
    role: Annotated[tuple[Annotated[Role, Field(strict=False)], ...], BeforeValidator(_one_or_many)] = ()
    scope: Patterns = ()
    between: tuple[str, str] | None = None
    set: RuleSet
    line: int = 0
    source: str = ""

    _check = field_validator("node", "op", "tensor", "scope")(_checked_patterns)

    @model_validator(mode="after")
    def _selects_something(self) -> Rule:
        if not (self.node or self.op or self.tensor or self.role or self.scope or self.between):
            raise ValueError("selects nothing; give node, op, tensor, role, scope or between")
        return self

    def selects(
        self, *, node: str = "", op: str = "", tensor: str = "", role: Role | None = None, scope: str = ""
    ) -> bool:
        """True when every selector given holds for these names; `between` needs the graph and is not looked at."""
        return (
            matches(self.node, node)
            and matches(self.op, op)
            and matches(self.tensor, tensor)
            and matches(self.scope, scope)
            and (not self.role or role in self.role)
        )

    def apply(self, wish: QuantWish) -> QuantWish:
        """The wish with this rule's fields; what no longer fits another field set here falls back to its default.

        Raises ConfigError naming the rule when the result contradicts itself.
        """
        given = self.set.given()
        fields = {name: getattr(wish, name) for name in QuantWish.model_fields}
        if given.get("granularity", "block") != "block":
            fields["block_size"] = None
        if {"bits", "signed", "scheme"} & frozenset(given):
            fields["storage"] = ""
        try:
            return QuantWish(**{**fields, **given})
        except ValidationError as error:
            cause = "; ".join(str(e["msg"]).removeprefix("Value error, ") for e in error.errors())
            raise ConfigError(self.describe(), cause, "complete the rule's `set`") from error

    def describe(self) -> str:
        """The rule in one line, with where it was written: what messages and plans call it."""
        parts = [
            f"{key}={'|'.join(str(v) for v in value)}"
            for key in ("node", "op", "tensor", "role", "scope")
            if (value := getattr(self, key))
        ]
        if self.between:
            parts.append(f"between {self.between[0]} and {self.between[1]}")
        sets = [f"{k}={_plain_observer(v) if k == 'observer' else v}" for k, v in self.set.given().items()]
        sets += [word for word in ("quantize", "float") if getattr(self.set, word)]
        where = f" ({self.source}:{self.line})" if self.line else ""
        return f"rule {' '.join(parts)} -> {', '.join(sets)}{where}"


class ImageConfig(_Frozen):
    """How an image file becomes the model's input: decoded, resized, cropped, scaled to `range`, minus mean, over std.

    size: (height, width) the model gets. resize: shorter side before a centre crop (None: it just covers `size`).
    crop: "center" cuts the middle out, "pad" fits the whole image and fills with `fill`, "none" stretches.
    range: what pixel values 0…255 become. mean, std: () or one value, or one per channel, in units of `range`.
    input: the model input that takes the image; "" when the model has only one.
    """

    size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
    resize: int | None = Field(default=None, ge=1)
    crop: Literal["center", "pad", "none"] = "center"
    fill: int = Field(default=0, ge=0, le=255)
    interpolation: Literal["bilinear", "bicubic", "nearest", "lanczos", "box"] = "bilinear"
    color: Literal["RGB", "BGR", "GRAY"] = "RGB"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    range: tuple[float, float] = (0.0, 1.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    input: str = ""

    @field_validator("size", mode="before")
    @classmethod
    def _square(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return (value, value)
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _channels(self) -> ImageConfig:
        channels = 1 if self.color == "GRAY" else 3
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (0, 1, channels):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} values; {self.color} has {channels} channel(s)"
                )
        if any(value <= 0 for value in self.std):
            raise ValueError("std must be above 0")
        if self.range[0] >= self.range[1]:
            raise ValueError("range must rise, e.g. [0, 1] or [-1, 1]")
        return self


class DataConfig(_Frozen):
    """Calibration data. samples: at most so many (None: all). batch: samples per run (None: chosen from the model)."""

    images: ImageConfig | None = None
    samples: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    batch: int | None = Field(default=None, ge=1)


class VerifyConfig(_Frozen):
    """The command's own check. holdout: samples kept from calibration (None: chosen from their number).

    latency: time float and int8 side by side. threads: for that timing and for the checking runs.
    """

    holdout: int | None = Field(default=None, ge=0)
    latency: bool = True
    threads: int = Field(default=1, ge=0)


def _activation_wish() -> QuantWish:
    return QuantWish(scheme="asymmetric", signed=False)


def _weight_wish() -> QuantWish:
    return QuantWish(scheme="symmetric", signed=True, granularity="channel")


class Config(_Frozen):
    """Everything asked for. The defaults are those of the preset `ort-int8`.

    source: the preset or file it was read from; "" when made in Python. skip: passes left out.
    attention: the products of activations inside it, for engines with a fused kernel: "auto" tries both.
    effort: what accuracy passes may cost; fast: none of them.
    """

    source: str = ""
    target: Literal["ort", "trt"] = "ort"
    mode: Literal["static", "weight-only"] = "static"
    activations: QuantWish = Field(default_factory=_activation_wish)
    weights: QuantWish = Field(default_factory=_weight_wish)
    bias: Literal["int32", "float"] = "int32"
    placement: Literal["rules", "measured"] = "rules"
    attention: Literal["float", "quantized", "auto"] = "float"
    effort: Literal["fast", "balanced", "high"] = "fast"
    skip: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    data: DataConfig = DataConfig()
    verify: VerifyConfig = VerifyConfig()
    _lines: dict[str, str] = PrivateAttr(default_factory=dict)

    def where(self, path: str) -> str:
        """`file:line: path` of a dotted path such as "activations.observer"; the path alone if it was not written."""
        place = self._lines.get(path)
        return f"{place}: {path}" if place else path
