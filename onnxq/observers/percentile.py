"""The range that contains a given share of the values."""

from __future__ import annotations

from onnxq.errors import ConfigError
from onnxq.observers.base import register_observer
from onnxq.observers.histogram import HistogramObserver
from onnxq.spec import QuantSpec


@register_observer("percentile")
class Percentile(HistogramObserver):
    """Keeps `percentile` % of all values, zeros included.

    Symmetric specs exclude the largest magnitudes, asymmetric ones half of the rest at each end. Inside a bin values
    are assumed to be evenly spread. The range never exceeds the exact minimum and maximum, given by percentile=100.
    """

    name = "percentile"

    def __init__(self, quant: QuantSpec, *, percentile: float = 99.999, bins: int = 4096) -> None:
        if not 50.0 < percentile <= 100.0:
            raise ConfigError(
                "observer 'percentile'", f"percentile={percentile} is outside (50, 100]", "default: 99.999", code="Q311"
            )
        super().__init__(quant, bins)
        self.percentile = percentile

    def choose_range(self) -> tuple[float, float]:
        """Find the quantiles at both ends."""
        view = self.histogram.view()
        out = view.count * ((100.0 - self.percentile) / 100.0)
        if self.quant.symmetric:
            top = view.absolute().quantile(view.count - out, out)
            return -top, top
        rest = view.count - out / 2
        return view.quantile(out / 2, rest), view.quantile(rest, out / 2)
