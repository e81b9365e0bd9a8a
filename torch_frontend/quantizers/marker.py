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


def mark_tensor(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, *, site: str, role: Role) -> Tensor:
    """Return x through a marker node; only inside torch.onnx.export.

    scale, zero_point: [] or [1] per tensor, [channels] per channel, blocked per block, as in `onnxq.spec.QParams`;
    the reader of the marker rounds the zero point.
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
    result: Tensor = torch.onnx.ops.symbolic(
        MARKER, (x, scale, zero_point), attrs, dtype=x.dtype, shape=x.shape, version=1
    )
    return result
