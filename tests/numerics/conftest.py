from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxq.runtime import Session
from onnxq.spec import PerBlock, PerChannel, QParams, QuantSpec
from tests.networks import parse_text

TYPES = {name: getattr(TensorProto, name.upper()) for name in ("int4", "uint4", "int8", "uint8", "int16", "uint16")}
Outputs = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@cache
def _session(kind: str, storage: str, axis: int, block: int, ranks: tuple[int, int], clipped: bool) -> Session:
    """x -> [Clip ->] QuantizeLinear -> DequantizeLinear; scale, zero point and bounds are inputs, so one session
    serves every example. The zero point comes as int32: numpy has no 4-bit type to feed."""
    attrs = f"<axis = {axis}{f', block_size = {block}' if block else ''}>"
    rank, grain = (
        f"[{','.join(name + str(k) for k in range(count))}]" for name, count in zip("AB", ranks, strict=True)
    )
    bounds = f", {kind} lo, {kind} hi" if clipped else ""
    text = f"""pair ({kind}{rank} x, {kind}{grain} s, int32{grain} zero{bounds}) => (int32{rank} q, {kind}{rank} y) {{
        z = Cast <to = {TYPES[storage]}> (zero)
        {"inside = Clip(x, lo, hi)" if clipped else "inside = Identity(x)"}
        stored = QuantizeLinear {attrs} (inside, s, z) y = DequantizeLinear {attrs} (stored, s, z)
        q = Cast <to = 6> (stored)
    }}"""
    model = parse_text(text.replace("[]", ""), opset=21, ir=10)
    onnx.checker.check_model(model)
    return Session(model, optimize=False, threads=1)


def _run(x: Any, qparams: QParams, spec: QuantSpec, bounds: Any = None) -> Outputs:
    grain = spec.granularity
    kind = {"float32": "float", "float16": "float16"}[x.dtype.name]
    many = isinstance(grain, (PerChannel, PerBlock))
    axis, block = (grain.axis if many else 1), (grain.size if isinstance(grain, PerBlock) else 0)
    session = _session(kind, spec.storage, axis, block, (x.ndim, np.ndim(qparams.scale)), bounds is not None)
    feeds = {"x": x, "s": qparams.scale.astype(x.dtype), "zero": qparams.zero_point}
    if bounds is not None:
        feeds |= {"lo": np.asarray(bounds[0]), "hi": np.asarray(bounds[1])}
    outputs = session.run(feeds)
    return outputs["q"], outputs["y"]


@pytest.fixture(scope="session")
def engine() -> Callable[..., Outputs]:
    """(x, qparams, spec, clip bounds) -> integers and floats as ONNX Runtime, optimizations off, computes them."""
    return _run
