"""Checkpoints of the float network, loaded into its quantized copy by their own names.

Conversion keeps a network's tensors, so that each is found again by identity. Only a folded batch norm leaves none: it
is folded once more, from the tensors of the checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing.batch_norms import Folded, fold_tensors

# Own names begin with the attribute in which a QuantModel holds the converted module.
INNER = "model."
_SHOWN = 6


class PartialStateWarning(UserWarning):
    """Part of a state dict was not loaded, or does not fit what the model holds from before."""


@dataclass(frozen=True)
class _Refold:
    """A batch norm folded into a layer. layer, norm: parameter or statistic -> its names in the float model."""

    layer: Mapping[str, tuple[str, ...]]
    norm: Mapping[str, tuple[str, ...]]
    eps: float


@dataclass
class FloatNames:
    """The names of a float model's state, and where its values are in the converted module.

    names: all of them. places: own name -> float names, several where weights are tied. folds: path of a layer -> the
    batch norm that it holds.
    """

    names: frozenset[str] = frozenset()
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    folds: dict[str, _Refold] = field(default_factory=dict)

    def note_folds(self, converted: nn.Module, known: Mapping[int, tuple[str, ...]]) -> None:
        """Record the layers that hold a batch norm since the last call. known: id of a tensor -> its float names."""
        for path, layer in converted.named_modules():
            folded = layer.__dict__.pop("folded", None)
            if isinstance(folded, Folded):
                tables = [
                    {key: known[id(held)] for key, held in tensors.items() if held is not None and id(held) in known}
                    for tensors in (folded.layer, folded.norm)
                ]
                self.folds[path] = _Refold(*tables, folded.eps)
        there = _read_tensors(converted)
        self.places = {own: names for own, names in self.places.items() if own in there and not self._is_folded(own)}

    def _is_folded(self, own: str) -> bool:
        return own.rpartition(".")[0] in self.folds

    def find_own(self, converted: nn.Module) -> dict[int, tuple[str, ...]]:
        """Id of each tensor of the converted module -> its float names."""
        return {id(held): self.places[own] for own, held in _read_tensors(converted).items() if own in self.places}

    def find_float_keys(self, keys: Iterable[str]) -> set[str]:
        """The keys of a float model's state among these; none where they are the converted model's own."""
        given = set(keys)
        found = given & self.names
        # A network may have a part called `model` itself, so all keys together decide.
        return set() if "_extra_state" in given or found <= {INNER + own for own in self.places} else found

    def translate(self, model: nn.Module, state: dict[str, Any], prefix: str, missing: list[str]) -> bool:
        """Rename a float model's values in `state` to those of `model`, a QuantModel. Returns True if there were any.

        missing: gets the names of values that a folded layer lacks.
        """
        keys = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
        given = {name: state.pop(prefix + name) for name in self.find_float_keys(keys)}
        if not given:
            return False
        made = self._place_values(model.get_submodule(INNER[:-1]), given, missing, prefix)
        # Quantizers keep what they have: a float state knows nothing of them.
        own = model.state_dict()
        kept = {key for key in own if key == "_extra_state" or _belongs_to_quantizer(model, key)}
        state.update({prefix + key: own[key] for key in kept if prefix + key not in state})
        state.update({f"{prefix}{INNER}{key}": value for key, value in made.items()})
        return True

    def _place_values(
        self, converted: nn.Module, given: Mapping[str, Any], missing: list[str], prefix: str
    ) -> dict[str, Any]:
        """Own name -> value."""
        made = {own: value for own, names in self.places.items() if (value := _read_first(given, names)) is not None}
        for path, fold in self.folds.items():
            tables = [
                {key: _read_first(given, names) for key, names in part.items()} for part in (fold.layer, fold.norm)
            ]
            lacking = [
                names[0]
                for part, values in zip((fold.layer, fold.norm), tables, strict=True)
                for key, names in part.items()
                if values[key] is None
            ]
            missing += [prefix + name for name in lacking]
            layer = converted.get_submodule(path)
            folded = (layer.weight, layer.bias) if lacking else fold_tensors(layer, Folded(*tables, fold.eps))
            made |= {f"{path}.weight": folded[0], f"{path}.bias": folded[1]}
        return made

    def find_unread(self, keys: Iterable[str]) -> list[str]:
        """Float names among these that no part of the converted module reads."""
        tables = [*self.places.values()]
        for fold in self.folds.values():
            tables += [*fold.layer.values(), *fold.norm.values()]
        read = {name for names in tables for name in names}
        # A folded batch norm counts no more batches.
        return sorted(name for name in keys if name not in read and not name.endswith("num_batches_tracked"))


def find_float_names(source: nn.Module, converted: nn.Module) -> FloatNames:
    """The float names of a converted module. source: the module that was converted, as it was named then."""
    tensors = _read_tensors(source)
    by_id: defaultdict[int, tuple[str, ...]] = defaultdict(tuple)
    for name, tensor in tensors.items():
        by_id[id(tensor)] += (name,)
    found = FloatNames(frozenset(tensors))
    found.note_folds(converted, by_id)
    for own, tensor in _read_tensors(converted).items():
        names = by_id.get(id(tensor), ())
        # Of tied weights a checkpoint may hold one; its own name comes first.
        if names and not found._is_folded(own):
            found.places[own] = tuple(sorted(names, key=lambda name, own=own: name != own))
    return found


def _read_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor of a module's state, under each name that it has."""
    found = module.state_dict(keep_vars=True)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _read_first(given: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((given[name] for name in names if name in given), None)


def _belongs_to_quantizer(model: nn.Module, key: str) -> bool:
    return isinstance(model.get_submodule(key.rpartition(".")[0]), Quantizer)
