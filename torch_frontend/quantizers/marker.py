"""What a quantizer leaves in an ONNX export: one node of our own domain, which names it and holds its numbers.

`onnxq.strip_markers` reads it again. It is found by its `site` alone; names, positions and scopes play no part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxq.sites import Role
from onnxq.spec import PerBlock, PerTensor, QuantSpec

MARKER = "ai.onnxq::FakeQuantize"


def mark(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, *, site: str, role: Role) -> Tensor:
    """x through a marker node; only inside torch.onnx.export. zero_point is rounded by whoever reads the marker.

    scale, zero_point: [] or [1] per tensor, [channels] per channel, blocked per block, as in `onnxq.spec.QParams`.
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
        attrs["axis"] = grain.axis % x.dim()
    if isinstance(grain, PerBlock):
        attrs["block_size"] = grain.size
    result: Tensor = torch.onnx.ops.symbolic(
        MARKER, (x, scale, zero_point), attrs, dtype=x.dtype, shape=x.shape, version=1
    )
    return result
