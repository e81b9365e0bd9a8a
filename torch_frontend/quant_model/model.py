"""QuantModel: a quantized, trainable copy of a float module, from calibration to export."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from onnxq.backends import load_config
from onnxq.config import Config
from onnxq.errors import ConfigError, PlanError
from onnxq.sites import Names
from onnxq.wording import join_names
from torch_frontend.export.run import Exportable
from torch_frontend.placement.pairs import Decision
from torch_frontend.qmodules import WeightQuantized, copy_with_tensors
from torch_frontend.quant_model import bn_tuning, calibrate, profile
from torch_frontend.quant_model.ancestor import AncestorNames, read_switches, rename_backend
from torch_frontend.quant_model.attach import INPUTS, WEIGHT
from torch_frontend.quant_model.build import build_quantized, check_float_module
from torch_frontend.quant_model.float_state import PartialStateWarning, find_float_names
from torch_frontend.quant_model.mermaid import draw_mermaid
from torch_frontend.quant_model.state import (
    State,
    check_step,
    disable_sites,
    enable_sites,
    switch_kinds,
)
from torch_frontend.quantizers import DisabledBy, Quantizer, override_switches, quantizers_of
from torch_frontend.tracing.modules import Inputs, find_module
from torch_frontend.tracing.values import compute_constant, has_shapes, is_float, record_shapes

Configuration = Config | str | Path | Mapping[str, Any] | None


class QuantModel(AncestorNames, Exportable):
    """A quantized, trainable copy of a float module.

    model: the float module; it does not change. config: as for the engine: a preset's name, a YAML file, a mapping of
    keys, or a Config; the section `torch` is for this class. example_inputs: one batch (a tensor, a tuple, or a
    mapping by name), from which shapes and types are read. target: a name of `onnxq.backends`, in place of the
    configuration's; with it, or with keys that name it, come the defaults of its preset. copy=False: train the given
    module's own Parameters instead of copies.

    state: float, observing, calibrated, quantized, frozen or exported. refusals: sites that should be quantized and
    cannot be, with reasons. left_float: sites that stay float because int8 does not pay, or by a rule. decisions:
    changes made by the passes. products: every product of tensors, quantized or with the reason why not. origin: where
    the graph comes from. quantizers: site -> quantizer.
    """

    # Hugging Face's Trainer adds its own arguments to those of a model whose forward takes any, unless this says no.
    accepts_loss_kwargs = False

    def __init__(
        self,
        model: nn.Module,
        config: Configuration = None,
        *,
        example_inputs: Any = None,
        target: str | None = None,
        copy: bool = True,
    ) -> None:
        super().__init__()
        self.quant_config = _load_config(config, target)
        check_float_module(model)
        with warnings.catch_warnings():
            # torch's own, of copies of exported modules.
            warnings.simplefilter("ignore", FutureWarning)
            source = copy_with_tensors(model) if copy else model
        built = build_quantized(source, self.quant_config, example_inputs)
        self.model = built.model
        self.refusals = built.refusals
        self.left_float = built.left_float
        self.decisions = built.decisions
        self.products = built.products
        self.origin = built.origin
        self.state = State.FLOAT
        self._float_names = find_float_names(source, built.model)
        self._batches: list[Inputs] | None = None
        # nn.Module starts in train mode; the copy has the mode of the given model.
        self.training = self.model.training
        switch_kinds(self.quantizers, False, False)

    # -- parts -------------------------------------------------------------------------------------------------

    @property
    def quantizers(self) -> dict[str, Quantizer]:
        """Site -> quantizer: activations in the order of the graph, then weights; those inside of layers last."""

        # Looked up at every call: `reconstruct` replaces quantizers, copies and pickles have their own.
        def rank(path: str) -> tuple[bool, bool]:
            return by_path[path].role.is_weight, not {WEIGHT, INPUTS}.isdisjoint(path.split("."))

        modules = self.model.named_modules()
        by_path = {path: module for path, module in modules if isinstance(module, Quantizer)}
        return {by_path[path].site: by_path[path] for path in sorted(by_path, key=rank)}

    @property
    def traced(self) -> bool:
        """False if the model's forward could not be traced and its layers were converted one by one."""
        return isinstance(self.model, fx.GraphModule)

    def weights(self) -> dict[str, Tensor]:
        """Site -> the float weight that its quantizer reads."""
        # A layer's quantizer is its child; that of a parameter is a call of its own.
        layers = [module for module in self.model.modules() if isinstance(module, WeightQuantized)]
        weights = {
            q.site: layer.weight
            for layer in layers
            for q in quantizers_of(layer)
            if q.role.is_weight
        }
        if self.traced:
            for node in self.model.graph.find_nodes(op="call_module"):
                quantizer = find_module(self.model, node)
                if isinstance(quantizer, Quantizer) and quantizer.role.is_weight:
                    weights[quantizer.site] = compute_constant(self.model, node.args[0])
        return weights

    def mermaid(self) -> str:
        """The graph and its quantizers as a Mermaid diagram."""
        return draw_mermaid(self.model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, quantized where quantizers are on."""
        if self.state is State.OBSERVING:
            inputs = Inputs(args, kwargs)
            if self._batches is not None:
                self._batches.append(calibrate.copy_inputs(inputs))
            if self.traced and not has_shapes(self.model.graph):
                self._leave_integers(self.model, inputs)
        return self.model(*args, **kwargs)

    def _leave_integers(self, model: fx.GraphModule, inputs: Inputs) -> None:
        """Disable quantizers of integers, found with the first batch if there was no example."""
        # This run only reads types; integers must reach no observer.
        with override_switches(quantizers_of(model), False):
            record_shapes(model, inputs)
        for node in model.graph.nodes:
            quantizer = find_module(model, node)
            if isinstance(quantizer, Quantizer) and not is_float(node.args[0]):
                quantizer.disabled_reason = "integers flow here"
                quantizer.observing = False
                self.decisions += (Decision(quantizer.site, "integers flow here", "integers"),)

    # -- lifecycle ---------------------------------------------------------------------------------------------

    def prepare_calibration(self, *, keep_inputs: bool = True) -> QuantModel:
        """Start observing: run batches through the model next, then call `calc_qparams`.

        keep_inputs: keep a copy of each batch on the host, which `calc_qparams(asym=True)` needs.
        """
        check_step("prepare_calibration", self.state)
        calibrate.start_observing(self.quantizers.values())
        self._batches = [] if keep_inputs else None
        self.state = State.OBSERVING
        return self

    def calc_qparams(
        self, asym: bool = False, w_quant: bool = True, a_quant: bool = True
    ) -> QuantModel:
        """Compute scales and zero points from the observed batches; quantization is off afterwards.

        asym: each activation is observed again behind quantized predecessors, in the order of the graph.
        w_quant, a_quant: whether weights and activations of these predecessors are quantized.
        Raises CalibrationError naming the sites that saw no value, NaN or inf; PlanError in another state.
        """
        check_step("calc_qparams", self.state)
        quantizers = self.quantizers
        for quantizer in quantizers.values():
            quantizer.observing = False
        calibrate.calibrate_weights(
            [q for q in quantizers.values() if q.role.is_weight], self.weights()
        )
        calibrate.calibrate_activations(q for q in quantizers.values() if not q.role.is_weight)
        if asym:
            self._calibrate_again(w_quant, a_quant)
        switch_kinds(quantizers, False, False)
        self.check()
        self._batches = None  # frees the batches
        self.state = State.CALIBRATED
        return self

    def _calibrate_again(self, w_quant: bool, a_quant: bool) -> None:
        step = "calc_qparams(asym=True)"
        if not self.traced:
            raise PlanError(
                step, "the model was not traced", "make its forward traceable", code="Q409"
            )
        if not self._batches:
            raise PlanError(
                step,
                "no batch was kept",
                "call prepare_calibration(keep_inputs=True) first",
                code="Q409",
            )
        calibrate.LayerwiseCalibration(
            self.model, weights=w_quant, activations=a_quant
        ).calibrate_batches(self._batches)

    def set_quant(self, weights: bool = True, activations: bool = True, **old: bool) -> QuantModel:
        """Switch quantization of weights and activations on or off; disabled sites stay off. old: Sparsebit's names."""
        check_step("set_quant", self.state)
        weights, activations = read_switches(weights, activations, old)
        switch_kinds(self.quantizers, weights, activations)
        if self.state is State.CALIBRATED and (weights or activations):
            self.state = State.QUANTIZED
        return self

    def init_qat(self) -> QuantModel:
        """Switch all quantizers on and the model to train mode; learned scales and zero points are trained."""
        check_step("init_qat", self.state)
        self.check()
        switch_kinds(self.quantizers, True, True)
        self.train()
        self.state = State.QUANTIZED
        return self

    def freeze(self) -> QuantModel:
        """Fix scales and zero points; switch all quantizers on and the model to eval mode.

        Batch norms that trained with the statistics of their batches (`fuse_bn: false`) are folded.
        """
        check_step("freeze", self.state)
        self.check()
        if self.state not in (State.FROZEN, State.EXPORTED):
            self.decisions += tuple(bn_tuning.fold_trained(self.model))
        for quantizer in self.quantizers.values():
            quantizer.freeze()
        switch_kinds(self.quantizers, True, True)
        self.eval()
        # Freezing again changes nothing, so an exported model stays exported.
        if self.state is not State.EXPORTED:
            self.state = State.FROZEN
        return self

    def check(self) -> QuantModel:
        """Raise CalibrationError naming the sites whose qparams are NaN, inf, not above 0 or not for the target.

        It waits for the device: call it from time to time in training, not at every step.
        """
        calibrate.check_qparams(self.quantizers.values())
        return self

    def begin_export(self) -> nn.Module:
        """The module to export. Raises PlanError before calibration, CalibrationError for qparams of no use."""
        check_step("export", self.state)
        self.check()
        # calc_qparams leaves everything off.
        if self.state is State.CALIBRATED:
            self.set_quant()
        if self.quant_config.torch.fuse_bn or self.state in (State.FROZEN, State.EXPORTED):
            return self.model
        # Engines have one kernel for a layer and its batch norm. Folded in a copy: the model itself does not change.
        inner = deepcopy(self.model)
        bn_tuning.fold_trained(inner)
        return inner

    def mark_exported(self) -> None:
        """Set the last state, after the file is written."""
        self.state = State.EXPORTED

    # -- switches ----------------------------------------------------------------------------------------------

    def disable(self, pattern: str, reason: str = "") -> Names:
        """Keep the matching sites float whatever the switches say; return them."""
        return tuple(q.site for q in disable_sites(self.quantizers, pattern, reason))

    def enable(self, pattern: str, *, force: bool = False) -> Names:
        """Undo `disable` for the matching sites, with `force` also decisions of passes; return them."""
        return tuple(q.site for q in enable_sites(self.quantizers, pattern, force=force))

    # -- measurement and batch norms ---------------------------------------------------------------------------

    def quantization_error(
        self, data: Any, metric: str | profile.Metric = "sqnr", mode: profile.Mode = "isolated"
    ) -> dict[str, float]:
        """Layer -> error of its output against the float model's, over all batches.

        data: a tensor, or an iterable of batches (tensors, tuples, mappings by name). metric: sqnr (dB), mse, cosine,
        max_abs, or a function of two float64 arrays. mode: "isolated" gives each layer the float model's values,
        quantized as its own inputs are; "cumulative" the quantized model's values, and adds "output".
        """
        check_step("quantization_error", self.state)
        profile.check_request(self.model, mode)
        measure = profile.measure_graph if self.traced else profile.measure_layers
        return measure(self.model, data, metric, mode)  # type: ignore[operator]

    @contextmanager
    def batchnorm_tuning(self) -> Iterator[QuantModel]:
        """Run batches inside the block: batch norms take the quantized model's statistics, and are folded at its end.

        Raises PlanError for weights quantized per tensor, naming the layer, and for models without batch norms.
        """
        check_step("batchnorm_tuning", self.state)
        pairs = bn_tuning.find_pairs(self.model)
        bn_tuning.check_tunable(self.model, pairs)
        switch_kinds(self.quantizers, True, True)
        with bn_tuning.tune_statistics(self.model):
            yield self
        known = self._float_names.find_own(self.model)
        self.decisions += tuple(bn_tuning.fold_tuned(self.model, pairs))
        self._float_names.note_folds(self.model, known)
        self.state = State.QUANTIZED

    # -- state -------------------------------------------------------------------------------------------------

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of a QuantModel, or of the float model by its own names, which changes no quantizer.

        Batch norms that were folded are folded again. Warns (PartialStateWarning) of all that was not loaded, where
        `strict` does not raise, and of scales from before new weights.
        """
        unread = self._float_names.find_unread(self._float_names.find_float_keys(state_dict))
        result = super().load_state_dict(state_dict, strict, assign)
        left_out = {
            "the model does not read": unread,
            "the state lacks": result.missing_keys,
            "it has no": result.unexpected_keys,
        }
        lines = [f"{text} {join_names(names)}" for text, names in left_out.items() if names]
        if lines:
            warnings.warn(f"not loaded: {'; '.join(lines)}", PartialStateWarning, stacklevel=2)
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Rename a float model's values before torch looks for its own names."""
        is_float = self._float_names.translate_state(self, state_dict, prefix, rest[2])
        if is_float and any(quantizer.calibrated for quantizer in self.quantizers.values()):
            text = "a float state gives new weights, and scales are from before: call prepare_calibration() and observe"
            warnings.warn(text, PartialStateWarning, stacklevel=2)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def get_extra_state(self) -> Tensor:
        """State and switches as JSON in a tensor of bytes, for the state dict."""
        # safetensors, in which trainers save, holds nothing but tensors.
        switches = {
            site: [q.enabled, q.disabled_reason, q.disabled_by.value, q.frozen]
            for site, q in self.quantizers.items()
        }
        text = json.dumps(
            {"state": self.state.value, "switches": switches, "specs": self._list_specs()}
        )
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def _list_specs(self) -> dict[str, str]:
        """Site -> bits and granularity of its scales."""
        quantizers = self.quantizers.items()
        return {site: f"{q.spec.bits} bits, {q.spec.granularity}" for site, q in quantizers}

    def set_extra_state(self, state: Tensor) -> None:
        """Restore state and switches; sites that the state does not have keep theirs.

        Raises PlanError for scales of other bits or another granularity, before anything is loaded.
        """
        restored = json.loads(bytes(state.cpu().numpy()))
        own = self._list_specs()
        # States of before have none.
        for site, spec in restored.get("specs", {}).items():
            if restored["state"] != State.FLOAT.value and spec != own.get(site, spec):
                cause = f"its scales are for {spec}, and the model is configured for {own[site]}"
                fix = "configure it as the state, or load weights alone and calibrate"
                raise PlanError(site, cause, fix, code="Q407")
        self.state = State(restored["state"])
        for site, quantizer in self.quantizers.items():
            if site in restored["switches"]:
                quantizer.enabled, quantizer.disabled_reason, by, frozen = restored["switches"][
                    site
                ]
                quantizer.disabled_by = DisabledBy(by)
                quantizer.freeze(frozen)


def _load_config(config: Configuration, target: str | None) -> Config:
    values = dict(config) if isinstance(config, Mapping) else {}
    values |= {} if target is None else {"target": target}
    if "target" in values:
        values["target"] = rename_backend(values["target"])
    source = values.pop("extends", None) if isinstance(config, Mapping) else config
    if not isinstance(source, (Config, str, Path, type(None))):
        raise ConfigError(
            "config",
            f"{type(source).__name__} is no configuration",
            "give a preset, a file or keys",
            code="Q301",
        )
    # A target brings the defaults of its preset, as in the commands.
    return load_config(source, values, target=values.get("target"))
