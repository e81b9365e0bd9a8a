"""QuantModel: a float module made quantized and trainable, calibrated, measured, frozen and handed on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from onnxq.config import Config, load_config
from onnxq.errors import ConfigError
from onnxq.sites import Refusal, Role
from torch_frontend.quant_model import calibrate
from torch_frontend.quant_model.build import Built, build
from torch_frontend.quant_model.draft import Decision
from torch_frontend.quant_model.state import State, check_step
from torch_frontend.quantizers import Quantizer


class QuantModel(nn.Module):
    """A quantized, trainable copy of a float module.

    model: the float module; it is left as it is. config: as for the engine: a preset's name, a YAML file, a mapping of
    keys, or a Config; the section `torch` is for this class. example_inputs: one batch (a tensor, a tuple, or a
    mapping by name), from which shapes and types are read. target: "ort", "trt" or "virtual" in place of the
    configuration's. copy=False: train the given module's own Parameters instead of copies.

    state: float, observing, calibrated, quantized, frozen or exported. refusals: what stays float though it could have
    been quantized, and why. decisions: what the passes changed. quantizers: by site.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config | str | Path | Mapping[str, Any] | None = None,
        *,
        example_inputs: Any = None,
        target: str | None = None,
        copy: bool = True,
    ) -> None:
        super().__init__()
        self.config = _configured(config, target)
        built = build(_copied(model) if copy else model, self.config, example_inputs)
        self.model = built.model
        self._built = Built(nn.Module(), built.paths, built.refusals, built.decisions)
        self.state = State.FLOAT
        self.set_enabled(False, False)

    # -- what it is made of ------------------------------------------------------------------------------------

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What stays float though it could have been quantized."""
        return self._built.refusals

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What the passes changed: quantizers switched off, batch norms folded."""
        return self._built.decisions

    @property
    def quantizers(self) -> dict[str, Quantizer]:
        """Site -> quantizer: activations in the order of the graph, then weights."""
        found: dict[str, Quantizer] = {}
        for site, path in self._built.paths.items():
            module = self.model.get_submodule(path)
            assert isinstance(module, Quantizer)
            found[site] = module
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, with what is switched on quantized."""
        return self.model(*args, **kwargs)

    # -- lifecycle ---------------------------------------------------------------------------------------------

    def prepare_calibration(self) -> QuantModel:
        """Observe: run batches through the model next, then `calc_qparams`."""
        check_step("prepare_calibration", self.state)
        calibrate.start(self.quantizers)
        self.state = State.OBSERVING
        return self

    def calc_qparams(self) -> QuantModel:
        """Scales and zero points from what was observed."""
        check_step("calc_qparams", self.state)
        quantizers = self.quantizers
        calibrate.activations(q for q in quantizers.values() if q.role is not Role.WEIGHT)
        calibrate.weights([q for q in quantizers.values() if q.role is Role.WEIGHT], self.weights())
        calibrate.stop(quantizers)
        self.state = State.CALIBRATED
        return self

    def weights(self) -> dict[str, Tensor]:
        """Site -> the float weight its quantizer reads."""
        return calibrate.tensors_of(self.model, self._built.paths)

    def set_enabled(self, weights: bool, activations: bool) -> None:
        """The switches alone, whatever the state."""
        for quantizer in self.quantizers.values():
            quantizer.enabled = weights if quantizer.role is Role.WEIGHT else activations

    def set_quant(self, weights: bool = True, activations: bool = True) -> QuantModel:
        """Switch quantization on or off; what a pass or `disable` switched off stays off."""
        check_step("set_quant", self.state)
        self.set_enabled(weights, activations)
        if self.state is State.CALIBRATED and (weights or activations):
            self.state = State.QUANTIZED
        return self


def _copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def _configured(config: Config | str | Path | Mapping[str, Any] | None, target: str | None) -> Config:
    overrides: dict[str, Any] = {} if target is None else {"target": target}
    if isinstance(config, Mapping):
        values = dict(config)
        base = values.pop("extends", None)
        return load_config(base, {**values, **overrides})
    if config is not None and not isinstance(config, (Config, str, Path)):
        raise ConfigError("config", f"{type(config).__name__} is no configuration", "give a preset, a file or keys")
    return load_config(config, overrides)
