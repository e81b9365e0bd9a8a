"""The contract of every quantizer: one site, one spec, qparams that are absent until calibrated."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from onnxq.backends import find_ideal
from onnxq.errors import CalibrationError, ConfigError, OnnxqError, PlanError
from onnxq.numerics import SumOrder, SumOrders, needs_bound, qparams_from_range, scale_floor
from onnxq.sites import Names, NameSet, Role, drop_repeats
from onnxq.spec import ObserverSpec, Option, QParams, QuantSpec
from torch_frontend.fake_quant import fake_quantize
from torch_frontend.fake_quant.grid import TensorPair, explain_misfit
from torch_frontend.quantizers.specs import (
    axis_of,
    block_size_of,
    check_options,
    check_qparams,
    check_spec,
    format_range,
    gather_shards,
    mark_tensor,
    shape_numbers,
)
from torch_frontend.quantizers.statistics import Statistics, range_statistics

# The target of quantizers that are made by hand: every spec is theirs.
_IDEAL = find_ideal().name


def warn_renamed(old: str, new: str) -> None:
    """DeprecationWarning of the caller's caller."""
    warnings.warn(f"`{old}` is Sparsebit's name: write `{new}`", DeprecationWarning, stacklevel=3)


class AncestorQuantizer:
    """The switches of a quantizer under Sparsebit's names."""

    enabled: bool

    def enable_quant(self) -> None:
        """Set `enabled`."""
        warn_renamed("enable_quant()", "enabled = True")
        self.enabled = True

    def disable_quant(self) -> None:
        """Clear `enabled`."""
        warn_renamed("disable_quant()", "enabled = False")
        self.enabled = False


Options = Mapping[str, Option]
Roles = tuple[Role, ...]


class DisabledBy(Enum):
    """Who switched a quantizer off for good; only a user's own decision is undone without force."""

    PASS = "pass"
    USER = "user"


class Quantizer(AncestorQuantizer, nn.Module):
    """Fake quantization of one site; subclasses define how its qparams start and how they are learned.

    spec: integer range and granularity; its axis is an axis of the tensor at this site.
    site, role: identity; every message and the exported marker name the site.
    observer: gives the first qparams; None: minmax. options: the algorithm's own, checked against `defaults`.
    target: a name of `onnxq.backends`. A spec it cannot hold is a ConfigError here, qparams a CalibrationError later.

    scale, zero_point: float32, of shape [1] / [channels] / blocked, buffers or parameters; None until calibrated.
    enabled: the switch of the user or of QuantModel. disabled_reason: why it is off for good, whatever the switch;
    disabled_by: who decided that. observing: collect statistics in forward. frozen: scale and zero point do not learn.

    To write your own: subclass, decorate with `@register_quantizer("name")`, and override the parts that differ:
    `statistics` (first qparams), `learned` (slots that are parameters), `fake_quantize` (forward when on), `bake`.
    """

    name: ClassVar[str] = ""
    defaults: ClassVar[Options] = {}
    # Allowed values of options that are words.
    choices: ClassVar[Mapping[str, Names]] = {}
    roles: ClassVar[Roles] = (Role.ACTIVATION, Role.WEIGHT, Role.OUTPUT)
    # Tensors of the state dict that exist once calibrated; those in `optional` may be missing even then.
    slots: ClassVar[Names] = ("scale", "zero_point")
    optional: ClassVar[NameSet] = frozenset()
    # The exported model has pairs for this site.
    marks: bool = True

    def __init__(
        self,
        spec: QuantSpec,
        *,
        site: str,
        role: Role = Role.ACTIVATION,
        observer: ObserverSpec | None = None,
        options: Options | None = None,
        target: str = _IDEAL,
    ) -> None:
        super().__init__()
        check_spec(spec, site, target)
        if role not in self.roles:
            takes = " and ".join(f"{known}s" for known in self.roles)
            raise ConfigError(
                site,
                f"{self.name or type(self).__name__} quantizes {takes} only",
                "choose another",
                code="Q316",
            )
        self.spec, self.site, self.role, self.target = spec, site, role, target
        self.observer = observer or ObserverSpec()
        self.options = check_options(options or {}, self.defaults, self.choices, site, self.name)
        self.enabled, self.observing, self.frozen = True, False, False
        self.disabled_reason: str | None = None
        self.disabled_by = DisabledBy.PASS
        # (lowest, highest) value of the activation in front, where an engine may drop that if scales stay inside.
        self.bound: tuple[float | None, float | None] = (None, None)
        self.origin = ""
        self._statistics: Statistics | None = None
        self._sums: tuple[tuple[SumOrder, Quantizer], ...] = ()
        # A wrong observer is an error now, not at the first batch.
        self._name_errors(lambda: range_statistics(spec, self.observer, role, site))
        # Moves with .to(device), so that the first qparams appear on the model's device.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)
        for slot in self.slots:
            if slot in self.learned:
                self.register_parameter(slot, None)
            else:
                self.register_buffer(slot, None)

    # -- overridden by subclasses ------------------------------------------------------------------------------

    @property
    def learned(self) -> NameSet:
        """Slots that are parameters; the others are buffers."""
        return frozenset()

    def statistics(self) -> Statistics:
        """A fresh collector of the statistics behind the first qparams."""
        return range_statistics(
            self.spec, self.observer, self.role, self.site, self.sum_orders(planned=True)
        )

    def make_slots(self, scale: Tensor, zero_point: Tensor) -> dict[str, Tensor]:
        """Slot -> its tensor for these qparams."""
        return {"scale": scale, "zero_point": zero_point}

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Return x quantized and dequantized; called when active and calibrated."""
        return self.round_to_grid(x)

    def bake(self, x: Tensor) -> Tensor:
        """The float tensor to export in place of x; differs where this quantizer does more than round to nearest."""
        return x

    def penalty(self) -> Tensor | None:
        """The algorithm's own term of the loss, or None."""
        return None

    def keep_legal(self) -> None:
        """Clamp learned slots to their domain, in place and without waiting for the device."""
        if "scale" in self.slots and self.scale is not None and self.scale.requires_grad:
            self.scale.data.clamp_(min=scale_floor(self.spec))

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def calibrated(self) -> bool:
        """True once all slots that are not optional hold tensors."""
        return all(
            getattr(self, slot) is not None for slot in self.slots if slot not in self.optional
        )

    @property
    def active(self) -> bool:
        """True if forward should quantize: switched on and not disabled for good."""
        return self.enabled and self.disabled_reason is None

    @property
    def axis(self) -> int | None:
        """Axis of the channels or blocks; None per tensor."""
        return axis_of(self.spec)

    def set_bit(self, bit: int) -> None:
        """Quantize to other bits, whose scales are still to come. Raises ConfigError for bits that the target lacks."""
        spec = replace(self.spec, bits=bit)
        check_spec(spec, self.site, self.target)
        self.spec = spec
        for slot in self.slots:
            setattr(self, slot, None)
        # They make scales of the bits they were begun with.
        self._statistics = None

    def bind_sums(self, order: SumOrder, data: Quantizer) -> None:
        """Keep the weight's 16-bit sums of this order while `data` quantizes the other factor of its products.

        data: quantizer of that factor; without effect unless it has 8 bits. See `onnxq.numerics.weights`.
        """
        # Narrower weights cannot overflow a sum; data of other types run on other kernels.
        if needs_bound(self.spec) and data.spec.storage_bits == 8 and not data.spec.is_float:
            self._sums = (*self._sums, (order, data))

    def bind_sums_of(self, other: Quantizer) -> None:
        """Keep the same sums as another quantizer of the same weight."""
        self._sums = other._sums

    def sum_orders(self, *, planned: bool = False) -> SumOrders:
        """The sums to keep now; planned: those to keep once every quantizer that is not disabled for good is on."""
        if not self._sums:
            return ()
        return drop_repeats(
            order
            for order, data in self._sums
            if (data.disabled_reason is None if planned else data.active)
        )

    def freeze(self, frozen: bool = True) -> None:
        """Stop (or resume) learning scale and zero point; the float weight of the site goes on learning."""
        self.frozen = frozen
        for slot in self.learned:
            if (tensor := getattr(self, slot)) is not None:
                tensor.requires_grad_(not frozen)

    # -- qparams -----------------------------------------------------------------------------------------------

    def observe(self, x: Tensor) -> None:
        """Add x to the statistics. Raises CalibrationError naming the site on NaN or inf."""
        self._anchor = self._anchor.to(x.device)
        self._statistics = self._statistics or self.statistics()
        self._name_errors(lambda: self._statistics.update(x))

    def observations(self) -> Statistics | None:
        """Statistics since the last `calc_qparams`, picklable for other ranks; None if nothing was observed."""
        return self._statistics

    def merge_observations(self, seen: Iterable[Statistics | None]) -> None:
        """Replace this rank's statistics by the merged ones of all ranks. seen: one per rank; not changed."""
        merged: Statistics | None = None
        for statistics in seen:
            if merged is None:
                merged = copy.deepcopy(statistics)
            elif statistics is not None:
                merged.merge(statistics)
        self._statistics = merged

    def calc_qparams(self) -> None:
        """Set scale and zero point from the statistics since the last call; without any, qparams stay.

        Raises CalibrationError naming the site if nothing was ever observed.
        """
        if self._statistics is None and self.calibrated:
            return
        statistics = self._statistics or self.statistics()
        self.load_qparams(self._name_errors(statistics.qparams))
        self._statistics = None

    def calc_qparams_with_minmax(self, lo: Any, hi: Any) -> None:
        """Set scale and zero point to cover [lo, hi], widened to hold 0. lo, hi: scalars, arrays or tensors."""
        ends = [
            end.detach().cpu().numpy() if isinstance(end, Tensor) else np.asarray(end)
            for end in (lo, hi)
        ]
        self.load_qparams(
            self._name_errors(lambda: qparams_from_range(*ends, self.spec, origin="given range"))
        )

    # Calibration may run in inference mode, whose tensors never learn.
    @torch.inference_mode(False)
    def load_qparams(self, qparams: QParams) -> None:
        """Use these qparams. Raises CalibrationError naming the site if spec or target cannot hold them."""
        checked = check_qparams(qparams, self.spec, self.site, self.target)
        self.origin = checked.origin
        # from_numpy shares the array, which is the caller's.
        scale = torch.from_numpy(checked.scale.copy()).to(self._anchor.device)
        zero = torch.from_numpy(checked.zero_point.astype(np.float32)).to(self._anchor.device)
        for slot, value in self.make_slots(scale, zero).items():
            self.put(slot, value)

    def qparams(self) -> QParams:
        """Scale and integer zero point as numpy arrays.

        Raises CalibrationError naming the site if there are none, or if training has made them illegal or not finite.
        """
        whole = (gather_shards(values.detach()).float().cpu() for values in self._read_qparams())
        scale, zero = (values.numpy() for values in shape_numbers(whole, self.spec))
        if not np.isfinite(zero).all():
            raise CalibrationError(
                self.site, f"zero point {zero.sum()}", "calibrate again", code="Q509"
            )
        stored = QParams(scale, np.rint(zero).astype(np.int32), self.origin)
        return check_qparams(stored, self.spec, self.site, self.target)

    def dequantized_range(self) -> tuple[Tensor, Tensor]:
        """(lowest, highest) value that can be represented, of the shape of `qparams`."""
        scale, zero = shape_numbers(self._read_qparams(), self.spec)
        zero = zero.round()  # learned zero points lie between integers
        return (self.spec.qmin - zero) * scale, (self.spec.qmax - zero) * scale

    def put(self, slot: str, value: Tensor) -> None:
        """Set a slot, in place where it has this shape already."""
        value = self._shape_slot(value)  # sharding (FSDP2) takes no shape []
        # In place, an optimizer made before keeps training the parameter that forward uses.
        tensor = getattr(self, slot)
        if tensor is not None and tensor.shape == value.shape:
            tensor.data.copy_(value)
        elif slot in self.learned:
            setattr(self, slot, nn.Parameter(value, requires_grad=not self.frozen))
        else:
            setattr(self, slot, value)

    def _shape_slot(self, value: Tensor) -> Tensor:
        return value.reshape(1) if value.dim() == 0 else value

    # -- forward -----------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Return x fake-quantized when active and calibrated, else x; observe it first when observing.

        Inside torch.onnx.export: x through the marker node of this quantizer.
        Raises PlanError naming the site if the scale's shape does not fit x, ConfigError if it is 0 or less on the CPU.
        """
        if torch.onnx.is_in_onnx_export():
            return self.marked(x)
        if self.observing:
            self.observe(x)
        if not (self.active and self.calibrated):
            return x
        if self.slots:
            shape = getattr(self, self.slots[0]).shape
            size = block_size_of(self.spec)
            if (misfit := explain_misfit(x.shape, shape, self.axis, size)) is not None:
                fix = "calibrate again with tensors of this shape, or change the granularity"
                raise PlanError(self.site, misfit, fix, code="Q407")
        # A compiler follows no handler of errors.
        if torch.compiler.is_compiling():
            return self.fake_quantize(x)
        return self._name_errors(lambda: self.fake_quantize(x))

    def round_to_grid(self, x: Tensor, scale: Tensor | None = None, **how: Any) -> Tensor:
        """`torch_frontend.fake_quant.fake_quantize` with this quantizer's spec, qparams and sums.

        scale: in place of the quantizer's own. how: edge, grad_scale, zero_point_grad_scale.
        """
        return fake_quantize(
            x,
            self.scale if scale is None else scale,
            self.zero_point,
            qmin=self.spec.qmin,
            qmax=self.spec.qmax,
            axis=self.axis,
            block_size=block_size_of(self.spec),
            sum_orders=self.sum_orders(),
            **how,
        )

    def _read_qparams(self) -> TensorPair:
        """(scale, zero point). Raises CalibrationError naming the site before calibration."""
        scale = self.scale
        zero = self.zero_point
        if scale is None or zero is None:
            fix = "calibrate first, or load a calibrated state"
            raise CalibrationError(self.site, "has no scale yet", fix, code="Q508")
        return scale, zero

    # -- export ------------------------------------------------------------------------------------------------

    def marked(self, x: Tensor) -> Tensor:
        """Return x through a marker node with this quantizer's site and qparams; x itself where it is off.

        Raises CalibrationError naming an uncalibrated site.
        """
        if not self.active:
            return x
        # prepare_marker has fixed these; without it (a plain torch.onnx.export) they are traced.
        buffers = self._buffers
        scale = buffers.get("marked_scale")
        zero = buffers.get("marked_zero_point")
        if scale is None or zero is None:
            scale, zero = self._read_qparams()
            x = self.bake(x)
        weight = buffers.get("marked_weight")
        return mark_tensor(
            x if weight is None else weight, scale, zero, self.spec, site=self.site, role=self.role
        )

    def prepare_marker(self, weight: Tensor | None = None) -> None:
        """Fix the marker's inputs as buffers: qparams as constants, and the baked weight if given.

        Raises CalibrationError naming the site if there are no qparams, or none that can be stored.
        """
        qparams = self.qparams()
        # Exporters merge equal constants. Of shape [1], scalars are not merged with those of the network.
        scale, zero = map(np.atleast_1d, (qparams.scale, qparams.zero_point))
        constants = {
            "scale": torch.from_numpy(scale.copy()),
            "zero_point": torch.from_numpy(zero.copy()),
            "weight": weight,
        }
        for name, value in constants.items():
            if value is not None:
                self.register_buffer(
                    f"marked_{name}", value.to(self._anchor.device), persistent=False
                )

    def forget_marker(self) -> None:
        """Remove the buffers of `prepare_marker`."""
        for name in [name for name in self._buffers if name.startswith("marked_")]:
            delattr(self, name)

    # -- plumbing ----------------------------------------------------------------------------------------------

    def _name_errors(self, compute: Callable[[], Any]) -> Any:
        """Result of compute(); an OnnxqError gets this site as its subject."""
        try:
            return compute()
        except OnnxqError as error:
            # Observers know no site.
            own = error.subject in (self.site, "weight", "activation")
            raise error.replace_text(self.site, error.cause if own else error.fault) from error

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        """Move slots with the module, but keep them float32 when it becomes half."""
        # fake_quantize takes float32 qparams for every dtype of x.
        before = {
            slot: tensor.detach()
            for slot in self.slots
            if (tensor := getattr(self, slot)) is not None
        }
        super()._apply(fn, recurse)
        for slot, tensor in before.items():
            now = getattr(self, slot)
            if now.dtype in (torch.float16, torch.bfloat16):
                now.data = tensor.to(now.device)
        return self

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load slots that may be absent here or in the state.

        A state that has an entry of this quantizer, or torch's metadata of it, but no slots, is of an uncalibrated one.
        A state without either, of a float model or a plain dict, changes nothing, and torch reports missing keys
        unless asked for strict=False.
        """
        metadata = rest[0]
        missing = rest[2]
        loaded = {
            slot: self._shape_slot(state[prefix + slot])
            for slot in self.slots
            if prefix + slot in state
        }
        state.update({prefix + slot: value for slot, value in loaded.items()})
        for slot in self.slots:
            tensor = getattr(self, slot)
            if slot in loaded:
                if tensor is None or tensor.shape != loaded[slot].shape:
                    self.put(slot, loaded[slot].detach().clone().to(self._anchor.device))
            elif loaded or metadata:
                setattr(self, slot, None)
                if loaded and slot not in self.optional:
                    missing.append(prefix + slot)
        super()._load_from_state_dict(state, prefix, *rest)
        if loaded:
            # Statistics from before belong to other qparams.
            self._statistics = None
            if self.calibrated:
                self.qparams()

    def extra_repr(self) -> str:
        """Site, bits, scheme and granularity; then scale and zero point, or why it is off."""
        grain = self.spec.granularity.word + ("" if self.axis is None else f" {self.axis}")
        text = f"{self.site!r}, {self.spec.bits} bits {self.spec.scheme} {self.spec.storage} per {grain}"
        if self.disabled_reason is not None:
            return f"{text}, disabled: {self.disabled_reason}"
        if not self.enabled:
            return f"{text}, off"
        if not self.calibrated:
            return f"{text}, not calibrated"
        scale, zero = (
            format_range(t.detach().cpu()) for t in (self.scale, self.zero_point.round())
        )
        return f"{text}, scale={scale}, zero_point={zero}{', frozen' if self.frozen else ''}"


# By site.
Quantizers = Mapping[str, Quantizer]
