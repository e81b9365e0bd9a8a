"""Names of Sparsebit's QuantModel, so that its users' code runs; each warns once where it is called."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onnxq.backends import list_backends
from onnxq.errors import ConfigError, PlanError, suggest_names
from torch_frontend.export.run import export_onnx
from torch_frontend.quant_model.state import State
from torch_frontend.quantizers import quantizers_of
from torch_frontend.quantizers.base import warn_renamed
from torch_frontend.tracing.modules import as_inputs

# Sparsebit's words for backends -> ours.
BACKENDS = {
    alias: backend.name
    for backend in list_backends()
    for alias in backend.aliases
    if alias != backend.name
}
# torch's exporter writes opset 18 and above; Sparsebit's default is 13.
_LOWEST_OPSET = 18
Checker = Callable[[Tensor, Tensor], Any]


def rename_backend(target: Any) -> Any:
    """Our word for a backend of Sparsebit's; any other as it is."""
    if target not in BACKENDS:
        return target
    warn_renamed(f'"{target}"', f'"{BACKENDS[target]}"')
    return BACKENDS[target]


def read_switches(weights: bool, activations: bool, old: Mapping[str, bool]) -> tuple[bool, bool]:
    """The switches of weights and activations, by Sparsebit's names where it is those that were given.

    Raises TypeError for other names.
    """
    if strange := [name for name in old if name not in ("w_quant", "a_quant")]:
        raise TypeError(f"set_quant() got an unexpected keyword argument {strange[0]!r}")
    if not old:
        return weights, activations
    warn_renamed("set_quant(w_quant=…, a_quant=…)", "set_quant(weights=…, activations=…)")
    # Off, where Sparsebit's user leaves one out.
    return old.get("w_quant", False), old.get("a_quant", False)


class AncestorNames:
    """Sparsebit's methods that are called otherwise here."""

    def init_QAT(self: Any) -> Any:
        """`init_qat`."""
        warn_renamed("init_QAT()", "init_qat()")
        return self.init_qat()

    def get_quantization_error(
        self: Any, data: Any, checker: Checker | None = None, is_async: bool = True
    ) -> dict[str, float]:
        """`quantization_error`, isolated where `is_async`. checker: of two tensors; None: their MSE."""
        warn_renamed(
            "get_quantization_error(is_async=…)",
            'quantization_error(mode="isolated" or "cumulative")',
        )
        metric = "mse"
        if checker is not None:
            wanted = checker
            metric = lambda a, b: float(wanted(torch.from_numpy(a), torch.from_numpy(b)))  # noqa: E731
        return self.quantization_error(data, metric, "isolated" if is_async else "cumulative")

    def dump_mermaid(self: Any, file: str | Path = "graph.mmd") -> None:
        """Write `mermaid()` to a file."""
        warn_renamed("dump_mermaid(file)", "mermaid()")
        Path(file).write_text(self.mermaid(), "utf-8")

    def set_lastmodule_wbit(self: Any, bit: int = 8) -> None:
        """Give the weight of the last layer this many bits. Raises PlanError once there are scales."""
        warn_renamed("set_lastmodule_wbit(bit)", "a rule with `node:` and `bits:`")
        if self.state is not State.FLOAT:
            raise PlanError(
                "set_lastmodule_wbit",
                "there are scales already",
                "call it before calibration",
                code="Q409",
            )
        # `modules` lists them as they were registered, which is the order of layers in most models.
        weights = [quantizer for quantizer in quantizers_of(self.model) if quantizer.role.is_weight]
        if weights:
            weights[-1].set_bit(bit)

    def export_onnx(
        self: Any,
        dummy_data: Any,
        name: str | Path,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        dynamic_axes: Mapping[str, Any] | None = None,
        opset_version: int = 13,
        verbose: bool = False,
        extra_info: bool = False,
    ) -> Any:
        """`torch_frontend.export.export_onnx`, over files that are there.

        dynamic_axes: {input: {axis: name}} or {input: [axes]}; those of outputs follow. extra_info: also write
        `<name>_extra.onnx`, with the attribute `bits`. verbose has no meaning.
        """
        warn_renamed(
            "QuantModel.export_onnx(…)", "torch_frontend.export.export_onnx(model, path, inputs)"
        )
        shapes = _read_axes(self, dummy_data, dynamic_axes or {}, input_names, output_names or ())
        return export_onnx(
            self,
            name,
            dummy_data,
            input_names=input_names,
            output_names=output_names,
            force=True,
            dynamic_shapes=shapes,
            opset=opset_version if opset_version >= _LOWEST_OPSET else None,
            bits_attribute=extra_info,
        )


def _read_axes(
    model: Any,
    batch: Any,
    axes: Mapping[str, Any],
    input_names: Sequence[str] | None,
    output_names: Sequence[str],
) -> Any:
    """torch.export's dynamic shapes of torch.onnx's dynamic axes. Raises ConfigError for a name of no input."""
    args, kwargs = as_inputs(batch)
    names = list(input_names or signature(model.model.forward).parameters)[: len(args)]
    names += list(kwargs)
    dims: dict[str, torch.export.Dim] = {}
    shapes: dict[str, dict[int, Any]] = {}
    for name, axes_of_input in axes.items():
        if name in output_names:
            continue
        if name not in names:
            raise ConfigError(
                f"dynamic_axes[{name!r}]", "is no input", suggest_names(name, names), code="Q303"
            )
        symbols = (
            axes_of_input
            if isinstance(axes_of_input, Mapping)
            else {axis: f"{name}_{axis}" for axis in axes_of_input}
        )
        shapes[name] = {
            axis: dims.setdefault(symbol, torch.export.Dim(symbol))
            for axis, symbol in symbols.items()
        }
    if not shapes:
        return None
    if kwargs:
        return {name: shapes.get(name) for name in kwargs}
    return tuple(map(shapes.get, names))
