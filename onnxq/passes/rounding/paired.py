"""The float and the quantized model on their way through the graph, side by side on the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnxq.passes.rounding.layerwise import LayerwiseRunner, Tensor
from onnxq.passes.rounding.statistics import MomentsRequest
from onnxq.runtime import Feeds
from onnxq.sites import TensorId


@dataclass(frozen=True, eq=False)
class PairedRunner:
    """feeds: the samples that both are run on."""

    feeds: Sequence[Feeds]
    real: LayerwiseRunner
    quantized: LayerwiseRunner

    def tensors(self, wanted: MomentsRequest) -> Iterator[tuple[Feeds, Tensor, Tensor]]:
        """Each sample with the operator's input in both models. Both advance to it at the first one."""
        if not self.feeds:
            return
        self.real.reach(wanted.data, wanted.reader)
        if wanted.paired is None:
            return
        self.quantized.reach(wanted.paired, wanted.reader)
        yield from zip(self.feeds, self.real.values(wanted.data), self.quantized.values(wanted.paired), strict=True)

    def pass_by(self, wanted: MomentsRequest) -> None:
        """Let both stand as after `tensors`, without running anything yet."""
        if self.feeds:
            self.real.reach(wanted.data, wanted.reader, later=True)
            if wanted.paired is not None:
                self.quantized.reach(wanted.paired, wanted.reader, later=True)

    def hold(self, real: TensorId, quantized: TensorId | None, node: str) -> bool:
        """True where these tensors, which the node reads, can still be had."""
        return quantized is not None and self.real.holds(real, node) and self.quantized.holds(quantized, node)
