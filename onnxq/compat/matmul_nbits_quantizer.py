"""MatMulNBitsQuantizer: weights alone, by onnxq's algorithms. Its configurations are onnxruntime's own, handed on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxq.compat.calibrate import read_samples
from onnxq.compat.options import (
    CallLists,
    CompatOption,
    Names,
    OptionTable,
    Overrides,
    convert_options,
    name_value,
    warn_caller,
    warn_meaningless,
)
from onnxq.compat.quant_utils import QuantFormat
from onnxq.compat.theirs import hand_on, import_theirs
from onnxq.errors import ConfigError
from onnxq.sites import Settings

if TYPE_CHECKING:
    import onnx

__getattr__ = hand_on("matmul_nbits_quantizer")
# Bits -> storage of symmetric and of asymmetric weights. MatMulNBits packs 2 bits from a type that opset 21 has.
_STORAGE = {2: ("int2", "uint2"), 4: ("int4", "uint4"), 8: ("int8", "uint8")}
_PACKED = {2: ("int4", "uint4")}
_BY_ERROR = "scales and rounding are chosen by the error that they cause"
_SETTINGS: OptionTable = {
    "ratios": CompatOption({}, reason=_BY_ERROR),
    "percdamp": CompatOption(0.01, reason=_BY_ERROR),
    "actorder": CompatOption(False, reason="weights keep their order, which MatMulNBits reads"),
    "mse": CompatOption(False),
    "perchannel": CompatOption(True, reason="blocks have a scale for each column"),
    "axis": CompatOption(
        1, reason="blocks lie along the inputs of a product, the only axis that MatMulNBits has"
    ),
    "quant_axes": CompatOption(
        {"MatMul": 0, "Gather": 1},
        reason="blocks lie along the inputs of a product and along rows of a table",
    ),
}
# Without samples, blocks have the scale of least error; RTN takes the one of their range.
_OBSERVERS = {
    **{name: {} for name in ("DEFAULT", "k_quant", "GPTQ", "HQQ")},
    "RTN": {"weights.observer": "minmax"},
}


class MatMulNBitsQuantizer:
    """Quantizes the constant weights of MatMul, and tables of Gather, in 2, 4 or 8 bits.

    `process` does it; `model` is onnxruntime's ONNXModel before and after. An algorithm's name stands for the one of
    onnxq that serves the same end: GPTQ rounds by samples, HQQ and k_quant choose scales and zero points by error.
    """

    def __init__(
        self,
        model: onnx.ModelProto | str | Path,
        bits: int = 4,
        block_size: int = 128,
        is_symmetric: bool = False,
        accuracy_level: int | None = None,
        nodes_to_exclude: Names = None,
        nodes_to_include: Names = None,
        quant_format: Any = QuantFormat.QOperator,
        op_types_to_quantize: Names = None,
        quant_axes: Any = None,
        channel_wised_quantize: bool = False,
        algo_config: Any = None,
    ) -> None:
        from onnxq.graph import load_model

        self.model_path = None if hasattr(model, "graph") else str(model)
        self.model = import_theirs("onnx_model").ONNXModel(load_model(model).proto)
        self.bits = bits
        self.block_size = block_size
        self.is_symmetric = is_symmetric
        self.accuracy_level = accuracy_level
        self.nodes_to_exclude = set(nodes_to_exclude or ())
        self.nodes_to_include = set(nodes_to_include or ())
        self.algo_config = algo_config or __getattr__("DefaultWeightOnlyQuantConfig")(
            block_size=block_size,
            is_symmetric=is_symmetric,
            accuracy_level=accuracy_level,
            quant_format=quant_format,
            op_types_to_quantize=op_types_to_quantize,
            quant_axes=quant_axes,
            bits=bits,
            channel_wised_quantize=channel_wised_quantize,
        )

    def process(self) -> None:
        """Quantize `model`, which becomes the quantized one. Warns (CompatWarning) of what means nothing here.

        Raises ConfigError for other widths than 2, 4 and 8, and for GPTQ without samples.
        """
        from onnxq.commands.quantize import quantize
        from onnxq.compat.selection import match_any, read_selection

        config = self.algo_config
        settings = {key: value for key, value in vars(config).items() if key in _SETTINGS}
        cautions = convert_options(settings, _SETTINGS)[1]
        if config.algorithm not in _OBSERVERS:
            cautions.append(warn_meaningless(f"algorithm={config.algorithm}", _BY_ERROR))
        reader = getattr(config, "calibration_data_reader", None)
        if config.algorithm == "GPTQ" and reader is None:
            fix = "give the configuration a calibration_data_reader, or take another one"
            raise ConfigError(
                "calibration_data_reader", "is None, and GPTQ rounds by samples", fix, code="Q319"
            )
        wish = read_selection(
            self.model.model,
            CallLists(sorted(config.op_types_to_quantize), None, sorted(self.nodes_to_exclude)),
        )
        custom: Mapping[str, Settings] = config.customized_weight_config or {}
        # In front of the lists: the first rule that matches wins.
        own = [
            {"node": match_any([node]), "set": self._convert_custom(entry)}
            for node, entry in custom.items()
        ]
        if self.nodes_to_include:
            own.append(
                {"node": match_any(sorted(self.nodes_to_include)), "set": {"quantize": True}}
            )
        warn_caller((*cautions, *wish.cautions))
        whole = getattr(config, "channel_wised_quantize", False)
        overrides = {**self._make_overrides(whole), "rules": [*own, *wish.rules]}
        preset = "ort-int8-weights" if whole else "ort-int4-weights"
        result = quantize(self.model.model, read_samples(reader), preset, overrides=overrides)
        self.model = import_theirs("onnx_model").ONNXModel(result.model)

    def _make_overrides(self, whole: bool) -> Overrides:
        config = self.algo_config
        settings = {**vars(self), **vars(config)}
        bits = settings["bits"]
        # GPTQ's own block is one of its updates, not of scales.
        size = self.block_size if config.algorithm == "GPTQ" else settings["block_size"]
        blocks = self._describe_blocks(bits, size, settings["is_symmetric"])
        if whole:
            del blocks["granularity"], blocks["block_size"]
        level = settings["accuracy_level"]
        return {
            **{f"weights.{key}": value for key, value in blocks.items()},
            # The preset keeps a byte for the weight that makes the outputs; here the width is the caller's.
            "projection_bits": bits,
            "embeddings": ("int4" if bits <= 4 else "int8")
            if "Gather" in config.op_types_to_quantize
            else "float",
            "emit": "nbits" if self._is_packed else "qdq",
            **({"accuracy_level": level} if level is not None and self._is_packed else {}),
            "latency": False,
            **_OBSERVERS.get(config.algorithm, {}),
        }

    def _convert_custom(self, entry: Settings) -> Overrides:
        """One of `customized_weight_config`, as the `set` of a rule."""
        symmetric = entry.get("scheme", "sym" if self.is_symmetric else "asym") == "sym"
        return self._describe_blocks(
            entry.get("bits", self.bits), entry.get("group_size", self.block_size), symmetric
        )

    @property
    def _is_packed(self) -> bool:
        return str(name_value(self.algo_config.quant_format)) == "QOperator"

    def _describe_blocks(self, bits: int, size: int, symmetric: bool) -> Overrides:
        if bits not in _STORAGE:
            raise ConfigError("bits", f"is {bits}", "give 2, 4 or 8", code="Q304")
        storage = (_PACKED if self._is_packed else {}).get(bits, _STORAGE[bits])[not symmetric]
        scheme = "symmetric" if symmetric else "asymmetric"
        kind = {"bits": bits, "scheme": scheme, "signed": symmetric, "storage": storage}
        return {**kind, "granularity": "block", "block_size": size}
