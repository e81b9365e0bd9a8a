"""The configuration: frozen, hashable, without arrays. Strings of the YAML are checked in these types and end there.

A wish says how a kind of tensor should be quantized; the target answers it with a spec or a Refusal.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from onnxq.config.data import DataConfig, RuntimeConfig, VerifyConfig
from onnxq.config.front_end import FrontEnd
from onnxq.config.values import Bits, Frozen
from onnxq.config.rules import QuantWish, Rule
from onnxq.errors import Location


def _activation_wish() -> QuantWish:
    return QuantWish(scheme="asymmetric", signed=False)


def _several(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else value


def _weight_wish() -> QuantWish:
    return QuantWish(scheme="symmetric", signed=True, granularity="channel")


class Config(Frozen):
    """Everything asked for. The defaults are those of the preset `ort-int8`.

    source: the preset or file it was read from; "" when made in Python. skip: passes left out.
    cpu: the kind of CPU that target ort places for; "any": one graph for all kinds that were measured.
    attention: the products of activations inside it, for engines with a fused kernel: "auto" tries both.
    effort: what accuracy passes may cost; fast: none of them. torch: for the front end alone.
    saturation: whether weights may overflow 16-bit sums in kernels of CPUs without VNNI; "avoid" costs about .2 dB.
    weight_bits_budget: bits that weights may have on average over their elements, from those of `weights` up;
    weight_bits: the widths to choose from, () for all.
    """

    source: str = ""
    target: Literal["ort", "trt", "virtual"] = "ort"
    mode: Literal["static", "weight-only"] = "static"
    activations: QuantWish = Field(default_factory=_activation_wish)
    weights: QuantWish = Field(default_factory=_weight_wish)
    bias: Literal["int32", "float"] = "int32"
    saturation: Literal["avoid", "allow"] = "avoid"
    placement: Literal["rules", "measured"] = "rules"
    cpu: Literal["any", "vnni", "avx2"] = "any"
    attention: Literal["float", "quantized", "auto"] = "float"
    effort: Literal["fast", "balanced", "high"] = "balanced"
    weight_bits_budget: Annotated[float, Field(ge=2, le=16)] | None = None
    weight_bits: Annotated[tuple[Bits, ...], BeforeValidator(_several)] = ()
    skip: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    data: DataConfig = DataConfig()
    verify: VerifyConfig = VerifyConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    torch: FrontEnd = FrontEnd()
    _lines: dict[str, Location] = PrivateAttr(default_factory=dict)

    def where(self, path: str) -> Location:
        """`file:line: path` of a dotted path such as "activations.observer"; the path alone if it was not written."""
        return self._lines.get(path, Location("")) / path
