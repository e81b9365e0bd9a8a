"""Quantizers by the names that configurations use, and the plainest of them."""

from collections.abc import Callable
from typing import Any, TypeVar

from onnxq.errors import ConfigError, suggest_names
from onnxq.spec import QuantSpec
from torch_frontend.quantizers.base import Quantizer

_Made = TypeVar("_Made", bound=type[Quantizer])
# Filled by the decorator when a quantizer's module is imported.
_REGISTRY: dict[str, type[Quantizer]] = {}


def register_quantizer(name: str) -> Callable[[_Made], _Made]:
    """Class decorator: a configuration with `name` makes this class.

    Raises ConfigError if the name is taken, TypeError if the class is no Quantizer.
    """

    def put(quantizer: _Made) -> _Made:
        if not (isinstance(quantizer, type) and issubclass(quantizer, Quantizer)):
            raise TypeError(f"{quantizer!r} is not a subclass of Quantizer")
        # A second class of one name would change the meaning of configurations and saved states.
        if name in _REGISTRY:
            raise ConfigError(
                f"quantizer {name!r}", "is registered already", "choose another name", code="Q310"
            )
        _REGISTRY[name] = quantizer
        quantizer.name = name
        return quantizer

    return put


def create_quantizer(name: str, spec: QuantSpec, **how: Any) -> Quantizer:
    """The quantizer called `name` for one site. how: as for Quantizer.

    Raises ConfigError for an unknown name or option, or a wrong spec.
    """
    kind = _REGISTRY.get(name)
    if kind is None:
        raise ConfigError(
            f"quantizer {name!r}", "does not exist", suggest_names(name, _REGISTRY), code="Q310"
        )
    return kind(spec, **how)


@register_quantizer("uniform")
class Uniform(Quantizer):
    """Round to nearest; the gradient passes wherever x rounds to an integer of the range and is 0 outside."""
