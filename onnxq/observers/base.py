"""The protocol of observers, their registry by name, the validation of observed values, and ranges without clipping."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from onnxq.arrays import Array, Array64, Floats, Interval, as_float32, as_float64
from onnxq.config import Config
from onnxq.errors import CalibrationError, ConfigError, suggest_names
from onnxq.numerics import check_weight_observer
from onnxq.sites import Names, Role
from onnxq.spec import ObserverSpec, QuantSpec

Range = tuple[Array64, Array64]


class Observer(Protocol):
    """Statistics of one site that grow batch by batch."""

    # `update` must be called once for each sample, not once for a batch.
    per_sample: bool
    # Calibration met -inf, as in masks, of which it keeps no statistics: `create_observer` begins with False.
    infinite: bool

    @property
    def count(self) -> int:
        """Number of values seen."""

    def update(self, x: Array, /) -> None:
        """Observe an array of any shape and float type. Empty arrays have no effect.

        Raises CalibrationError on NaN or inf, and is then unchanged.
        """

    def merge(self, other: Any, /) -> None:
        """Add the values observed by another observer of the same kind and options."""

    def range(self) -> Range:
        """Return lo, hi as float64 of shape []. Raises CalibrationError without values."""


class Values(NamedTuple):
    """A validated array as flat float32, with its smallest and largest value."""

    flat: Floats
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

    def put(observer: _Made) -> _Made:
        if name in _REGISTRY:
            raise ConfigError(
                f"observer {name!r}", "is registered already", "choose another name", code="Q310"
            )
        _REGISTRY[name] = observer
        return observer

    return put


def list_observers() -> Names:
    """List the names of all registered observers, sorted."""
    return tuple(sorted(_REGISTRY))


def create_observer(spec: ObserverSpec, quant: QuantSpec) -> Observer:
    """Create an observer for a site that will be quantized as `quant`.

    Raises ConfigError for an unknown name, option, or option value.
    """
    subject = f"observer {spec.name!r}"
    factory = _REGISTRY.get(spec.name)
    if factory is None:
        raise ConfigError(
            subject,
            "does not exist",
            suggest_names(spec.name, _REGISTRY),
            code="Q310",
        )
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for key, value in spec.options:
        if key not in known:
            raise ConfigError(
                subject,
                f"has no option {key!r}",
                suggest_names(key, known),
                code="Q311",
            )
        # An option without a default has no type to compare with.
        if known[key] is not inspect.Parameter.empty:
            check_option_type(subject, key, value, known[key])
    observer: Observer = factory(quant, **dict(spec.options))
    observer.infinite = False
    return observer


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


def check_option_type(subject: str, key: str, value: object, default: object) -> None:
    """Raise ConfigError about `subject` for an option that is not of the type of its default."""
    # YAML reads `99` as an integer, where a share of 99 percent is meant.
    wanted = (float, int) if isinstance(default, float) else (type(default),)
    # In Python True is an int.
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        cause = f"{key}={value!r} is not a {wanted[0].__name__}"
        raise ConfigError(subject, cause, f"default: {default!r}", code="Q311")


def flatten_values(x: ArrayLike) -> Values | None:
    """Flatten an array to float32 and find its ends; None if it is empty. Raises CalibrationError on NaN or inf."""
    array = np.asarray(x)
    if array.size == 0:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        # A float64 beyond float32 becomes inf here, and is reported below.
        single = as_float32(array)
        # Any order will do, so the one in memory, which needs no copy.
        flat = single.ravel(order="K")
        # + 0.0 turns -0.0 into 0.0: which of the two min and max return depends on the order of the values.
        low = float(flat.min()) + 0.0
        high = float(flat.max()) + 0.0
    # NaN and inf show in min and max: no pass of its own over all values.
    if not (np.isfinite(low) and np.isfinite(high)):
        nans = int(np.isnan(flat).sum())
        infs = int(np.isinf(flat).sum())
        at = tuple(map(int, np.argwhere(~np.isfinite(single))[0]))
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
            f"observer {observer!r}",
            "needs evenly spaced levels, FP8 has none",
            "use minmax or mse",
            code="Q311",
        )


def make_empty_error(name: str) -> CalibrationError:
    """Make the error for a range without observed values."""
    return CalibrationError(
        f"{name} observer",
        "saw no value",
        "feed samples that reach this tensor, or leave it float",
        code="Q502",
    )


class ValueObserver:
    """An observer of finite values, which knows their number and extremes; its range lies inside these."""

    name = ""
    per_sample = False
    infinite = False
    count: int
    minimum: float
    maximum: float

    def __init__(self, quant: QuantSpec) -> None:
        self.quant = quant

    def update(self, x: Array) -> None:
        """Observe an array. Raises CalibrationError on NaN or inf."""
        values = flatten_values(x)
        if values is not None:
            self.add_values(values)

    def merge(self, other: ValueObserver) -> None:
        """Add the values observed by `other`, which must have the same kind and options."""
        if type(self) is not type(other):
            raise TypeError(f"cannot merge {type(other).__name__} into {type(self).__name__}")
        self.add_observed(other)

    def range(self) -> Range:
        """Return lo, hi, inside the range of the data. Raises CalibrationError without values."""
        if not self.count:
            raise make_empty_error(self.name)
        # Closed forms, such as ACIQ's for a Laplace distribution, may lie beyond all that was seen.
        low, high = np.clip(self.choose_range(), self.minimum, self.maximum)
        return as_float64(low), as_float64(high)

    def add_values(self, values: Values) -> None:
        """Add the values of an array."""
        raise NotImplementedError

    def add_observed(self, other: Any) -> None:
        """Add what an observer of the same kind keeps of its values."""
        raise NotImplementedError

    def choose_range(self) -> Interval:
        """Choose lo, hi where there are values."""
        raise NotImplementedError


@register_observer("minmax")
class MinMax(ValueObserver):
    """The smallest and the largest value observed."""

    name = "minmax"

    def __init__(self, quant: QuantSpec) -> None:
        super().__init__(quant)
        self.count = 0
        self.minimum = np.inf
        self.maximum = -np.inf

    def add_values(self, values: Values) -> None:
        """Count the values, and extend the range to them."""
        self._extend_range(values.flat.size, values.low, values.high)

    def add_observed(self, other: MinMax) -> None:
        """Add the count, and extend the range."""
        self._extend_range(other.count, other.minimum, other.maximum)

    def _extend_range(self, count: int, low: float, high: float) -> None:
        self.count += count
        self.minimum = min(self.minimum, low)
        self.maximum = max(self.maximum, high)

    def choose_range(self) -> Interval:
        """The extremes."""
        return self.minimum, self.maximum


@register_observer("moving_average")
class MovingAverage(MinMax):
    """The mean of the samples' minima and the mean of their maxima.

    The name comes from an exponential average, which depends on the order of the samples; the plain mean does not.
    """

    name = "moving_average"
    per_sample = True

    def __init__(self, quant: QuantSpec) -> None:
        super().__init__(quant)
        self._samples = 0
        # Exact sums of floats: rounding would depend on the order.
        self._low = Fraction(0)
        self._high = Fraction(0)

    def add_values(self, values: Values) -> None:
        """Add the extremes of one sample."""
        super().add_values(values)
        self._add_sums(1, Fraction(values.low), Fraction(values.high))

    def add_observed(self, other: MovingAverage) -> None:  # type: ignore[override]
        """Add the sums of the samples' extremes."""
        super().add_observed(other)
        self._add_sums(other._samples, other._low, other._high)

    def choose_range(self) -> Interval:
        """The means of the samples' extremes."""
        return float(self._low / self._samples), float(self._high / self._samples)

    def _add_sums(self, samples: int, low: Fraction, high: Fraction) -> None:
        self._samples += samples
        self._low += low
        self._high += high
