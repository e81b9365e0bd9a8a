"""The protocol of observers, their registry by name, the validation of observed values, and ranges without clipping."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxq.config import Config
from onnxq.errors import CalibrationError, ConfigError
from onnxq.nearest import suggest_names
from onnxq.numerics import check_weight_observer
from onnxq.sites import Role
from onnxq.spec import ObserverSpec, QuantSpec

Range = tuple[NDArray[np.float64], NDArray[np.float64]]


class Observer(Protocol):
    """Statistics of one site that grow batch by batch."""

    # `update` must be called once for each sample, not once for a batch.
    per_sample: bool
    # Calibration met -inf, as in masks, of which it keeps no statistics: `create_observer` begins with False.
    infinite: bool

    @property
    def count(self) -> int:
        """Number of values seen."""

    def update(self, x: NDArray[Any], /) -> None:
        """Observe an array of any shape and float type. Empty arrays have no effect.

        Raises CalibrationError on NaN or inf, and is then unchanged.
        """

    def merge(self, other: Any, /) -> None:
        """Add the values observed by another observer of the same kind and options."""

    def range(self) -> Range:
        """Return lo, hi as float64 of shape []. Raises CalibrationError without values."""


class Values(NamedTuple):
    """A validated array as flat float32, with its smallest and largest value."""

    flat: NDArray[np.float32]
    low: float
    high: float


Factory = Callable[..., Any]
_Made = TypeVar("_Made", bound=Factory)
# By the name in configurations; filled by `register_observer`.
_REGISTRY: dict[str, Factory] = {}


def register_observer(name: str) -> Callable[[_Made], _Made]:
    """Register a class as the observer `name` of configurations (decorator).

    The class is called as cls(quant_spec, **options). Its keyword-only parameters are the options; each option must
    have the type of its default. Raises ConfigError if the name is taken.
    """

    def put(made: _Made) -> _Made:
        if name in _REGISTRY:
            raise ConfigError(f"observer {name!r}", "is registered already", "choose another name", code="Q310")
        _REGISTRY[name] = made
        return made

    return put


def list_observers() -> tuple[str, ...]:
    """List the names of all registered observers, sorted."""
    return tuple(sorted(_REGISTRY))


def create_observer(spec: ObserverSpec, quant: QuantSpec) -> Observer:
    """Create an observer for a site that will be quantized as `quant`.

    Raises ConfigError for an unknown name, option, or option value.
    """
    factory = _REGISTRY.get(spec.name)
    if factory is None:
        raise ConfigError(f"observer {spec.name!r}", "does not exist", suggest_names(spec.name, _REGISTRY), code="Q310")
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for key, value in spec.options:
        if key not in known:
            raise ConfigError(
                f"observer {spec.name!r}", f"has no option {key!r}", suggest_names(key, known), code="Q311"
            )
        _check_type(spec.name, key, value, known[key])
    made: Observer = factory(quant, **dict(spec.options))
    made.infinite = False
    return made


def check_observers(config: Config) -> None:
    """Raise ConfigError, with file and line, for an observer that is not registered, or an option it does not take."""
    wishes: list[tuple[str, ObserverSpec | None, bool]] = [
        ("activations", config.activations.observer, False),
        ("weights", config.weights.observer, True),
    ]
    for number, rule in enumerate(config.rules):
        observer = rule.set.observer
        # A rule for tensors of all kinds may name one that some of them have.
        mixed = not rule.role and observer is not None and observer.is_for_weights
        wishes.append((f"rules[{number}].set", observer, mixed or rule.role == (Role.WEIGHT,)))
    for section, observer, weights in wishes:
        if observer is None:
            continue
        try:
            if weights:
                check_weight_observer(observer)
            else:
                create_observer(observer, QuantSpec())
        except ConfigError as error:
            raise config.locate_error(f"{section}.observer", error) from error


def _check_type(observer: str, key: str, value: object, default: object) -> None:
    if default is inspect.Parameter.empty:
        return
    wanted: tuple[type, ...] = (float, int) if isinstance(default, float) else (type(default),)
    # In Python True is an int.
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ConfigError(
            f"observer {observer!r}",
            f"{key}={value!r} is not a {wanted[0].__name__}",
            f"default: {default!r}",
            code="Q311",
        )


def flatten_values(x: ArrayLike) -> Values | None:
    """Flatten an array to float32 and find its ends; None if it is empty. Raises CalibrationError on NaN or inf."""
    array = np.asarray(x)
    if array.size == 0:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        single = array.astype(np.float32, copy=False)
        # Any order will do, so the one in memory, which needs no copy.
        flat = single.ravel(order="K")
        # + 0.0 turns -0.0 into 0.0: which of the two min and max return depends on the order of the values.
        low, high = float(flat.min()) + 0.0, float(flat.max()) + 0.0
    # NaN and inf show in min and max: no pass of its own over all values.
    if not (np.isfinite(low) and np.isfinite(high)):
        nans, infs = int(np.isnan(flat).sum()), int(np.isinf(flat).sum())
        at = tuple(int(k) for k in np.argwhere(~np.isfinite(single))[0])
        raise CalibrationError(
            "activation",
            f"{nans} NaN and {infs} inf among {array.size} values, the first at {at}",
            "find the input or the node that makes them; the float model is at fault",
            code="Q501",
        )
    return Values(flat, low, high)


def require_even_steps(observer: str, quant: QuantSpec) -> None:
    """Raise ConfigError for FP8, whose values are not evenly spaced as this observer's theory assumes."""
    if quant.is_float:
        raise ConfigError(
            f"observer {observer!r}", "needs evenly spaced levels, FP8 has none", "use minmax or mse", code="Q311"
        )


def make_empty_error(name: str) -> CalibrationError:
    """Make the error for a range without observed values."""
    return CalibrationError(
        f"{name} observer", "saw no value", "feed samples that reach this tensor, or leave it float", code="Q502"
    )


def check_same_kind(one: object, other: object) -> None:
    """Raise TypeError unless two observers may be merged."""
    if type(one) is not type(other):
        raise TypeError(f"cannot merge {type(other).__name__} into {type(one).__name__}")


def make_range(low: float, high: float) -> Range:
    """Convert two floats to the arrays that `Observer.range` returns."""
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


@register_observer("minmax")
class MinMax:
    """The smallest and the largest value observed."""

    per_sample = False
    infinite = False

    def __init__(self, quant: QuantSpec) -> None:
        self.count = 0
        self.minimum, self.maximum = math.inf, -math.inf

    def update(self, x: NDArray[Any]) -> None:
        """Observe an array. Raises CalibrationError on NaN or inf."""
        values = flatten_values(x)
        if values is not None:
            self.count += values.flat.size
            self.minimum, self.maximum = min(self.minimum, values.low), max(self.maximum, values.high)

    def merge(self, other: MinMax) -> None:
        """Add the values that `other` has observed."""
        check_same_kind(self, other)
        self.count += other.count
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)

    def range(self) -> Range:
        """Return lo, hi. Raises CalibrationError without values."""
        if not self.count:
            raise make_empty_error("minmax")
        return make_range(self.minimum, self.maximum)


@register_observer("moving_average")
class MovingAverage:
    """The mean of the samples' minima and the mean of their maxima.

    The name comes from an exponential average, which depends on the order of the samples; the plain mean does not.
    """

    per_sample = True
    infinite = False

    def __init__(self, quant: QuantSpec) -> None:
        self.count = 0
        self._samples = 0
        # Exact sums of floats: rounding would depend on the order.
        self._low, self._high = Fraction(0), Fraction(0)

    def update(self, x: NDArray[Any]) -> None:
        """Observe one sample. Raises CalibrationError on NaN or inf."""
        values = flatten_values(x)
        if values is not None:
            self.count += values.flat.size
            self._samples += 1
            self._low += Fraction(values.low)
            self._high += Fraction(values.high)

    def merge(self, other: MovingAverage) -> None:
        """Add the values that `other` has observed."""
        check_same_kind(self, other)
        self.count += other.count
        self._samples += other._samples
        self._low += other._low
        self._high += other._high

    def range(self) -> Range:
        """Return lo, hi. Raises CalibrationError without values."""
        if not self._samples:
            raise make_empty_error("moving_average")
        return make_range(float(self._low / self._samples), float(self._high / self._samples))
