"""The node of a quantizer in an ONNX export, of our own domain, with the quantizer's site and qparams.

`onnxq.strip_markers` reads it back, by its `site` alone; names, positions and scopes do not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxq.sites import Role
from onnxq.spec import PerBlock, PerTensor, QuantSpec

MARKER = "ai.onnxq::FakeQuantize"


def mark_tensor(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, spec: QuantSpec, *, site: str, role: Role
) -> Tensor:
    """Return x through a marker node; only inside torch.onnx.export.

    scale, zero_point: [] or [1] per tensor, [channels] per channel, blocked per block, as in `onnxq.spec.QParams`;
    the reader of the marker rounds the zero point. Both None for a spec that is dynamic.
    """
    attrs: dict[str, Any] = {
        "site": site,
        "role": str(role),
        "qmin": spec.qmin,
        "qmax": spec.qmax,
        "bits": spec.bits,
        "scheme": "symmetric" if spec.symmetric else "asymmetric",
        "storage": spec.storage,
    }
    grain = spec.granularity
    if not isinstance(grain, PerTensor):
        # Not negative: a reader of the marker may not know the tensor's rank.
        attrs["axis"] = grain.axis % x.dim()
    if isinstance(grain, PerBlock):
        attrs["block_size"] = grain.size
    if spec.dynamic:
        attrs["dynamic"] = 1
    inputs = (x,) if scale is None or zero_point is None else (x, scale, zero_point)
    result: Tensor = torch.onnx.ops.symbolic(MARKER, inputs, attrs, dtype=x.dtype, shape=x.shape, version=1)
    return result
