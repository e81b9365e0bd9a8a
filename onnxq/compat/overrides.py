"""TensorQuantOverrides, and the conversions between widths that ONNX Runtime's recipe adds to them, as rules.

A tensor's own entry is a rule for its name. Operators of targets that take whole graphs read and write in one width:
there the maker and the readers of a tensor in another width than the usual one get that width, and the planner converts
at their other sides. `convert` is a rule for the tensor at the nodes that receive it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx

from onnxq.arrays import Interval
from onnxq.backends import Target
from onnxq.compat.options import warn_meaningless
from onnxq.errors import ConfigError, suggest_names
from onnxq.interop.overrides import read_integer_type
from onnxq.sites import Caution, NameSet, Settings

Rule = dict[str, Any]
# The entries of one tensor: one, or one for each channel.
Entries = Sequence[Settings]
_NUMBERS = ("scale", "zero_point", "rmin", "rmax")
# Keys that say again, or otherwise, what a scale with its zero point says.
_EXCLUDED = ("rmax", "rmin", "symmetric", "reduce_range")

_BY_PLAN = "scales of weights are chosen with their values; for others `onnxq plan`, edit it, `onnxq apply`"


class OverrideError(ConfigError, ValueError):
    """Entries of TensorQuantOverrides that contradict each other; a ValueError, as onnxruntime raises one."""


@dataclass(frozen=True)
class TensorOverrides:
    """The entries of a call by tensor, and what they are relative to.

    usual_type: of activations without an entry. spread: operators get one width where an entry asks for another.
    """

    entries: Mapping[str, Entries]
    target: Target
    usual_type: str
    spread: bool = True


@dataclass(frozen=True)
class OverriddenGraph:
    """The graph in which overrides are to hold. cautions: gets a warning for each entry that means nothing here."""

    nodes: Sequence[onnx.NodeProto]
    constants: NameSet
    overrides: TensorOverrides
    cautions: list[Caution]

    @property
    def target(self) -> Target:
        """The target of the call."""
        return self.overrides.target

    @cached_property
    def makers(self) -> Mapping[str, onnx.NodeProto]:
        """The node that makes each tensor."""
        return {name: node for node in self.nodes for name in node.output}

    @cached_property
    def computing(self) -> NameSet:
        """Operators that have a kernel of their own: not those that move values, or that one in front takes up."""
        rules = self.target.rules
        computing = {op for rule in rules if not rule.shares for op in rule.ops}
        return frozenset(computing.difference(*(rule.fuses for rule in rules)))

    def find_readers(self, tensor: str) -> list[str]:
        """The nodes that read a tensor."""
        return [node.name for node in self.nodes if tensor in node.input]

    def find_makers(self, tensor: str) -> list[str]:
        """The node that makes a tensor, and those up to the one whose kernel writes it."""
        names = []
        maker = self.makers.get(tensor)
        while maker is not None:
            names.append(maker.name)
            ends = maker.op_type in self.computing or not maker.input
            maker = None if ends else self.makers.get(maker.input[0])
        return names

    def make_rules(self) -> Iterator[Rule]:
        """Yield rules, those for single nodes first."""
        # The first entry speaks for all channels.
        listed = self.overrides.entries.items()
        first = {name: dict(entries[0]) for name, entries in listed if entries}
        usual_bits, _ = _read_type(self.overrides.usual_type)
        spreads = self.overrides.spread and self.target.whole
        # Nodes that get another width than the usual one, as they make or read a tensor of it.
        widths: dict[str, int] = {}
        for name, entry in first.items() if spreads else ():
            bits = _read_type(entry["quant_type"])[0] if "quant_type" in entry else usual_bits
            if bits != usual_bits and name not in self.constants and "convert" not in entry:
                widths |= dict.fromkeys((*self.find_makers(name), *self.find_readers(name)), bits)
        for name, entry in first.items():
            convert = entry.pop("convert", None)
            own = self._convert_entry(name, entry)
            readers = self.find_readers(name)
            if convert is not None and self.target.whole:
                entry = dict(convert)
                wanted = entry.pop("recv_nodes", None) or readers
                for node in sorted({*wanted} - {*readers}):
                    reason = f"{node!r} does not read it; {suggest_names(node, readers)}"
                    self._warn(name, "recv_nodes", reason)
                if receivers := [node for node in readers if node in wanted]:
                    read = self._convert_entry(name, entry)
                    yield {"node": receivers, "tensor": [name], "set": read}
            elif convert is not None:
                reason = f"all that reads a tensor has one type of it on target {self.target.name}"
                self._warn(name, "convert", reason)
            # Of operators in another width, at their side of the tensor.
            at_tensor = readers + ([] if "bits" in own else self.find_makers(name))
            for node in at_tensor if own else ():
                if widths.get(node, bits := own.get("bits", usual_bits)) != bits:
                    yield {"node": [node], "tensor": [name], "set": {**own, "bits": widths[node]}}
            if own:
                yield {"tensor": [name], "set": own}
        for width in dict.fromkeys(widths.values()):
            nodes = [node for node, bits in widths.items() if bits == width]
            yield {"node": nodes, "role": "activation", "set": {"bits": width}}

    def _convert_entry(self, name: str, entry: Settings) -> Rule:
        """Make the `set` of a rule."""
        override = dict(entry)
        constant = name in self.constants
        kind = override.pop("quant_type", None)
        bits, signed = _read_type(kind or self.overrides.usual_type)
        symmetric = override.get("symmetric")
        ends = None if constant else _read_range(name, override, bits, signed)
        changes: Rule = {"bits": bits} if read_integer_type(kind) else {}
        if self.target.whole:
            # Signs and zero points are those that its kernels read: with another one, the steps are the same.
            changes |= {"storage": "int4"} if constant and changes.get("bits") == 4 else {}
            if symmetric in (None, constant):
                override.pop("symmetric", None)
        else:
            override.pop("symmetric", None)
            changes |= {"signed": signed} if changes else {}
            # As onnxruntime has it (`is_weight_symmetric`): signed weights are symmetric.
            if symmetric is None and constant and changes:
                symmetric = signed
            if symmetric is not None:
                changes["scheme"] = "symmetric" if symmetric else "asymmetric"
        if override.pop("axis", None) is not None:
            changes["granularity"] = "channel"
        if ends is not None:
            changes["range"] = ends
            override = {key: value for key, value in override.items() if key not in _NUMBERS}
        for key in override:
            self._warn(name, key, _BY_PLAN if key in _NUMBERS else "onnxq chooses it")
        return changes

    def _warn(self, name: str, key: str, reason: str) -> None:
        subject = f"TensorQuantOverrides: {key!r} of {name!r}"
        self.cautions.append(warn_meaningless(subject, reason))


def _read_type(kind: Any) -> tuple[int, bool]:
    """Bits and sign of a type; of one that is no integer those of the narrowest that is one byte."""
    return read_integer_type(kind) or (8, False)


def _read_range(name: str, override: Settings, bits: int, signed: bool) -> Interval | None:
    """The lowest and highest value that the numbers of a tensor are for; None where they are not complete."""
    if {"scale", "zero_point"} <= set(override):
        subject = f"TensorQuantOverrides of {name!r}"
        if clashing := ", ".join(key for key in _EXCLUDED if key in override):
            cause = f"option(s) [{clashing}] are invalid with 'scale' and 'zero_point'"
            raise OverrideError(subject, cause, "leave out one or the other", code="Q304")
        scale = float(override["scale"])
        if not scale > 0:
            raise OverrideError(
                subject, f"has the scale {override['scale']}", "give one above 0", code="Q304"
            )
        zero = int(override["zero_point"])
        lowest = -(1 << (bits - 1)) if signed else 0
        return (lowest - zero) * scale, (lowest + (1 << bits) - 1 - zero) * scale
    return (
        (float(override["rmin"]), float(override["rmax"]))
        if {"rmin", "rmax"} <= set(override)
        else None
    )
