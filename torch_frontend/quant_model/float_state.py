"""Checkpoints of the float network, loaded into its quantized copy by their own names.

Conversion keeps a network's tensors, so that each is found again by identity. Only a folded batch norm leaves none: it
is folded once more, from the tensors of the checkpoint.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from onnxq.sites import Names, NameSet
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing.batch_norms import Folded, fold_tensors

# Own names begin with the attribute in which a QuantModel holds the converted module.
INNER = "model."
_SHOWN = 6


class PartialStateWarning(UserWarning):
    """Part of a state dict was not loaded, or does not fit what the model holds from before."""


@dataclass(frozen=True)
class _Refold:
    """A batch norm folded into a layer. names: tensor of `Folded` -> its names in the float model."""

    names: Mapping[str, Names]
    eps: float


@dataclass
class FloatNames:
    """The names of a float model's state, and where its values are in the converted module.

    names: all of them. places: own name -> float names, several where weights are tied. folds: path of a layer -> the
    batch norm that it holds.
    """

    names: NameSet
    places: dict[str, Names] = field(default_factory=dict)
    folds: dict[str, _Refold] = field(default_factory=dict)

    def note_folds(self, converted: nn.Module, known: Mapping[Tensor, Names]) -> None:
        """Record the layers that hold a batch norm since the last call. known: tensor -> its float names."""
        for path, layer in converted.named_modules():
            folded = layer.__dict__.pop("folded", None)
            if isinstance(folded, Folded):
                # The tensors are the float model's own, which folding kept: identity
                # finds their names.
                tensors = folded.tensors.items()
                names = {key: known[tensor] for key, tensor in tensors if tensor in known}
                self.folds[path] = _Refold(names, folded.eps)
        there = _read_tensors(converted)
        self.places = {
            own: names
            for own, names in self.places.items()
            if own in there and not self._is_folded(own)
        }

    def _is_folded(self, own: str) -> bool:
        return own.rpartition(".")[0] in self.folds

    def find_own(self, converted: nn.Module) -> dict[Tensor, Names]:
        """Each tensor of the converted module -> its float names."""
        tensors = _read_tensors(converted)
        return {tensor: self.places[own] for own, tensor in tensors.items() if own in self.places}

    def find_float_keys(self, keys: Iterable[str]) -> set[str]:
        """The keys of a float model's state among these; none where they are the converted model's own."""
        known = set(keys)
        names = known & self.names
        # A network may have a part called `model` itself, so all keys together decide.
        own = {INNER + own for own in self.places}
        return set() if "_extra_state" in known or names <= own else names

    def translate_state(
        self, model: nn.Module, state: dict[str, Any], prefix: str, missing: list[str]
    ) -> bool:
        """Rename a float model's values in `state` to those of `model`, a QuantModel. Returns True if there were any.

        missing: gets the names of values that a folded layer lacks.
        """
        keys = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
        values = {name: state.pop(prefix + name) for name in self.find_float_keys(keys)}
        if not values:
            return False
        placed = {
            own: value
            for own, names in self.places.items()
            if (value := _read_first(values, names)) is not None
        }
        for path, fold in self.folds.items():
            tensors = {key: _read_first(values, names) for key, names in fold.names.items()}
            lacking = [names[0] for key, names in fold.names.items() if tensors[key] is None]
            missing += [prefix + name for name in lacking]
            layer = model.get_submodule(INNER + path)
            folded = (
                (layer.weight, layer.bias)
                if lacking
                else fold_tensors(layer, Folded(tensors, fold.eps))
            )
            placed |= {f"{path}.weight": folded[0], f"{path}.bias": folded[1]}
        # Quantizers keep what they have: a float state knows nothing of them.
        for key, value in model.state_dict().items():
            owner = model.get_submodule(key.rpartition(".")[0])
            if key == "_extra_state" or isinstance(owner, Quantizer):
                state.setdefault(prefix + key, value)
        state.update({f"{prefix}{INNER}{key}": value for key, value in placed.items()})
        return True

    def find_unread(self, keys: Iterable[str]) -> list[str]:
        """Float names among these that no part of the converted module reads."""
        read = {name for names in self.places.values() for name in names}
        for fold in self.folds.values():
            read.update(*fold.names.values())
        # A folded batch norm counts no more batches.
        return sorted(
            name for name in keys if name not in read and not name.endswith("num_batches_tracked")
        )


def find_float_names(source: nn.Module, converted: nn.Module) -> FloatNames:
    """The float names of a converted module. source: the module that was converted, as it was named then."""
    tensors = _read_tensors(source)
    by_tensor: defaultdict[Tensor, Names] = defaultdict(tuple)
    for name, tensor in tensors.items():
        by_tensor[tensor] += (name,)
    float_names = FloatNames(frozenset(tensors))
    float_names.note_folds(converted, by_tensor)
    for own, tensor in _read_tensors(converted).items():
        names = by_tensor[tensor]
        # Of tied weights a checkpoint may hold one; its own name comes first.
        if names and not float_names._is_folded(own):
            float_names.places[own] = tuple(sorted(names, key=lambda name, own=own: name != own))
    return float_names


def _read_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor of a module's state, under each name that it has."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _read_first(state: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((state[name] for name in names if name in state), None)
