"""A quantizer for exports by hand."""

from __future__ import annotations

from typing import Any

from onnxq.sites import Role
from onnxq.spec import QuantSpec
from torch_frontend.quantizers import Uniform

ACT = QuantSpec(bits=8, signed=False, symmetric=False)


def uniform(site: str, lo: Any = -2.0, hi: Any = 2.0, spec: QuantSpec = ACT, role: Role = Role.ACTIVATION) -> Uniform:
    made = Uniform(spec, site=site, role=role)
    made.calc_qparams_with_minmax(lo, hi)
    return made
