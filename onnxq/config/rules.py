"""The request for one kind of tensor, and the rules that change it by name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from onnxq.config.document import list_faults
from onnxq.config.front_end import Quantizer
from onnxq.config.values import (
    Bits,
    Ends,
    Extent,
    Grain,
    Observer,
    Patterns,
    Scheme,
    Section,
    Storage,
    matches_any,
    wrap_single,
)
from onnxq.errors import ConfigError
from onnxq.sites import JsonObject, Role
from onnxq.spec import ObserverSpec, QuantSpec, make_granularity


class TensorConfig(Section):
    """The requested quantization of one kind of tensor; `spec` converts it to a QuantSpec."""

    bits: Bits = 8
    scheme: Scheme = "symmetric"
    # None: the usual type of the scheme (symmetric: signed, asymmetric: unsigned).
    signed: bool | None = None
    narrow_range: bool = False
    # The least width of the range that scale and zero point are for.
    min_range: Extent = 0.0
    granularity: Grain = "tensor"
    # Elements per block; for granularity "block" only.
    block_size: int | None = Field(default=None, ge=2)
    # "": the narrowest whole-byte type. "int4", "uint4": the packed types of opset 21, "int2", "uint2" those of 25.
    # "float8e4m3fn": FP8 (opset 19).
    storage: Storage = ""
    observer: Observer = ObserverSpec()
    # Of activations: scale and zero point are computed at each run, from the values themselves.
    dynamic: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> TensorConfig:
        if self.granularity == "block" and self.block_size is None:
            raise ValueError("granularity 'block' needs a block_size")
        if self.granularity != "block" and self.block_size is not None:
            raise ValueError(
                f"block_size is only for granularity 'block', not {self.granularity!r}"
            )
        if self.narrow_range and not self.is_signed:
            raise ValueError(
                "narrow_range drops the lowest level of a signed type; this one is unsigned"
            )
        # A trial spec, with any axis: contradictions show here, where file and line are known.
        try:
            self.spec(0)
        except ConfigError as error:
            raise ValueError(f"{error.subject} {error.cause}; {error.fix}") from error
        return self

    @property
    def is_signed(self) -> bool:
        """The requested sign, or the usual one of the scheme."""
        return self.scheme == "symmetric" if self.signed is None else self.signed

    def spec(self, axis: int | None) -> QuantSpec:
        """Make the QuantSpec of a tensor whose channel (or block) axis is `axis`.

        Raises ConfigError if the granularity needs an axis and the tensor has none.
        """
        whole = self.granularity == "tensor"
        if axis is None and not whole:
            raise ConfigError(
                f"granularity {self.granularity!r}",
                "this tensor has no channel axis",
                "ask for granularity: tensor",
                code="Q313",
            )
        return QuantSpec(
            bits=self.bits,
            signed=self.is_signed,
            symmetric=self.scheme == "symmetric",
            narrow_range=self.narrow_range,
            min_range=self.min_range,
            granularity=make_granularity(None if whole else axis, self.block_size),
            storage=self.storage,
            dynamic=self.dynamic,
        )


class RuleSet(Section):
    """The changes of a rule; None leaves a field as it is."""

    bits: Bits | None = None
    scheme: Scheme | None = None
    signed: bool | None = None
    narrow_range: bool | None = None
    min_range: Extent | None = None
    granularity: Grain | None = None
    block_size: int | None = Field(default=None, ge=2)
    storage: Storage | None = None
    observer: Observer | None = None
    dynamic: bool | None = None
    # Of activations: the lowest and highest value that scale and zero point are for. Nothing is observed or searched.
    range: Ends | None = None
    # For the torch front end only.
    quantizer: Quantizer | None = None
    # Quantize nodes that the target's size rules would leave float because they do not get faster.
    quantize: bool = False
    # Leave the tensor unquantized.
    float: bool = False
    # The float type of these nodes where others compute in a narrower one. It says nothing of pairs.
    high_precision: Literal["float32"] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> RuleSet:
        changes = self._list_changes()
        if not self.float and not changes and self.high_precision is None:
            raise ValueError(
                "sets nothing; give bits, scheme, granularity, observer, range …, `quantize: true`, `float: true` or "
                "`high_precision: float32`"
            )
        if self.float and changes:
            raise ValueError(
                f"`float: true` leaves nothing to quantize, so {', '.join(changes)} cannot be set with it"
            )
        if self.range is not None and (self.dynamic or self.range[0] >= self.range[1]):
            raise ValueError("range is [low, high], of scales that stand in the file")
        return self

    @property
    def concerns_pairs(self) -> bool:
        """True when the rule says something of quantization."""
        return self.float or bool(self._list_changes())

    def _list_changes(self) -> list[str]:
        """The keys that say something of pairs."""
        return [
            *self.given(),
            *(key for key in ("quantize", "quantizer", "range") if getattr(self, key)),
        ]

    def given(self) -> JsonObject:
        """The tensor fields that this rule sets."""
        return {k: v for k in TensorConfig.model_fields if (v := getattr(self, k)) is not None}


class Rule(Section):
    """Selectors, and the changes for tensors that all of them select. Patterns of one selector are alternatives."""

    node: Patterns = ()
    op: Patterns = ()
    tensor: Patterns = ()
    role: Annotated[
        tuple[Annotated[Role, Field(strict=False)], ...], BeforeValidator(wrap_single)
    ] = ()
    scope: Patterns = ()
    # (a, b): every node on a path from tensor or node a to tensor or node b, both included.
    between: tuple[str, str] | None = None
    set: RuleSet
    # Position of the rule: line 0 if it came from Python.
    line: int = 0
    source: str = ""

    @model_validator(mode="after")
    def _selects_something(self) -> Rule:
        if not (self.node or self.op or self.tensor or self.role or self.scope or self.between):
            raise ValueError("selects nothing; give node, op, tensor, role, scope or between")
        if Role.BIAS in self.role:
            raise ValueError(
                "biases are int32 or float together, as the key `bias` of the configuration says"
            )
        if self.set.range is not None and self.role and Role.ACTIVATION not in self.role:
            raise ValueError("`range` is of activations; give `role: activation`, or no role")
        return self

    def selects(
        self,
        *,
        node: str = "",
        op: str = "",
        tensor: str = "",
        role: Role | None = None,
        scope: str = "",
    ) -> bool:
        """True if every selector matches these names. `between` needs the graph and is checked by the planner."""
        return (
            matches_any(self.node, node)
            and matches_any(self.op, op)
            and matches_any(self.tensor, tensor)
            and matches_any(self.scope, scope)
            and (not self.role or role in self.role)
        )

    def apply(self, tensor: TensorConfig, role: Role = Role.ACTIVATION) -> TensorConfig:
        """Change a request; a field that no longer fits one set by this rule gets its default.

        role: of the tensor; only activations have scales of each run, and observers that weights do not have.

        Raises ConfigError naming the rule if the result contradicts itself.
        """
        changes = self.set.given()
        if role.is_weight:
            changes.pop("dynamic", None)
            if not self.role and not changes.get("observer", ObserverSpec()).is_for_weights:
                del changes["observer"]
        fields = dict(tensor)
        if changes.get("granularity", "block") != "block":
            fields["block_size"] = None
        # The inherited storage was chosen for the inherited width and sign.
        if {"bits", "signed", "scheme"} & frozenset(changes):
            fields["storage"] = ""
        try:
            return TensorConfig(**{**fields, **changes})
        except ValidationError as error:
            cause = "; ".join(fault.cause for fault in list_faults(error, TensorConfig))
            raise ConfigError(
                self.describe(),
                cause,
                "complete the rule's `set`",
                code="Q304",
                file=self.source,
                line=self.line or None,
            ) from error

    def describe(self) -> str:
        """Format the rule in one line with its position: its name in messages and plans."""
        parts = [
            f"{key}={'|'.join(map(str, value))}"
            for key in ("node", "op", "tensor", "role", "scope")
            if (value := getattr(self, key))
        ]
        if self.between:
            parts.append(f"between {self.between[0]} and {self.between[1]}")
        settings = self.set.model_dump(mode="json", exclude_defaults=True)
        if self.set.quantizer is not None:
            settings["quantizer"] = self.set.quantizer.name
        # Those that are True alone need no value.
        sets = [
            key if key in ("quantize", "float") else f"{key}={value}"
            for key, value in settings.items()
        ]
        where = f" ({self.source}:{self.line})" if self.line else ""
        return f"rule {' '.join(parts)} -> {', '.join(sets)}{where}"
