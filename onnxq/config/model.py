"""The configuration: frozen, hashable, without arrays. Strings of the YAML become types here and go no further.

It states a request for each kind of tensor; the target answers with a spec or a Refusal.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from onnxq.config.data import DataConfig, RuntimeConfig, VerifyConfig
from onnxq.config.front_end import FrontEnd
from onnxq.config.rules import Rule, TensorConfig
from onnxq.config.values import Bits, Frozen
from onnxq.errors import Location


def _default_activations() -> TensorConfig:
    return TensorConfig(scheme="asymmetric", signed=False)


def _wrap_numbers(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else value


def _default_weights() -> TensorConfig:
    return TensorConfig(scheme="symmetric", signed=True, granularity="channel")


class Config(Frozen):
    """The whole configuration. The defaults are those of the preset `ort-int8`."""

    # The preset or file it was read from; "" if made in Python.
    source: str = ""
    target: Literal["ort", "trt", "virtual"] = "ort"
    mode: Literal["static", "weight-only"] = "static"
    activations: TensorConfig = Field(default_factory=_default_activations)
    weights: TensorConfig = Field(default_factory=_default_weights)
    bias: Literal["int32", "float"] = "int32"
    # Whether weights may overflow 16-bit sums in kernels of CPUs without VNNI. "avoid" costs about 0.2 dB.
    saturation: Literal["avoid", "allow"] = "avoid"
    placement: Literal["rules", "measured"] = "rules"
    # The kind of CPU that target ort places for; "any": one graph for all kinds that were measured.
    cpu: Literal["any", "vnni", "avx2"] = "any"
    # The products of activations in attention, for engines with a fused kernel; "auto" tries both.
    attention: Literal["float", "quantized", "auto"] = "float"
    # Time that accuracy passes may take; "fast": none of them run.
    effort: Literal["fast", "balanced", "high"] = "balanced"
    # Bits of weights on average over their elements, at least those of `weights`.
    weight_bits_budget: Annotated[float, Field(ge=2, le=16)] | None = None
    # The widths to choose from for that; () for all.
    weight_bits: Annotated[tuple[Bits, ...], BeforeValidator(_wrap_numbers)] = ()
    # Names of passes to leave out.
    skip: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    data: DataConfig = DataConfig()
    verify: VerifyConfig = VerifyConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    # For the torch front end only.
    torch: FrontEnd = FrontEnd()
    # Position of each dotted path that was written, for messages. Private, so that dumps leave it out.
    _lines: dict[str, Location] = PrivateAttr(default_factory=dict)

    def find_place(self, path: str) -> Location | None:
        """Find where a dotted path such as "activations.observer" was written; None if it was not."""
        return self._lines.get(path)

    def where(self, path: str) -> Location:
        """`file:line: path` of a dotted path; the path alone if it was not written."""
        return (self.find_place(path) or Location("")) / path
