"""TensorRT-RTX beside narrow float types: the operators that it has in float32 only, and int8 kernels that stay."""

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import onnxq
from onnxq.backends.engine import Kernel
from onnxq.backends.trt.rules import MISSING
from onnxq.spec import FloatType
from tests.backends.graphs import model
from tests.backends.rtx import is_heavy, kernels, list_types, needs_rtx, runs_int8
from tests.networks import parse_text

pytestmark = [needs_rtx, pytest.mark.trt]
# Operators in a graph of their own; those of other tables are covered by whole networks.
BODIES = {
    "Celu": "y{k} = Celu(x)",
    "ConvTranspose": "y{k} = ConvTranspose(x, w)",
    "GlobalLpPool": "y{k} = GlobalLpPool(x)",
    "HardSwish": "y{k} = HardSwish(x)",
    "LpNormalization": "y{k} = LpNormalization(x)",
    "LpPool": "y{k} = LpPool <kernel_shape = [2,2]> (x)",
    "MeanVarianceNormalization": "y{k} = MeanVarianceNormalization(x)",
    "Mish": "y{k} = Mish(x)",
    "RandomUniformLike": "n{k} = RandomUniformLike(x) y{k} = Add(x, n{k})",
    "Shrink": "y{k} = Shrink(x)",
}


def build_operators(op_types: Sequence[str], kind: FloatType, folder: Path) -> list[Kernel]:
    """The kernels of operators beside each other, in one type; AssertionError where TensorRT refuses one."""
    number = kind.onnx_type
    dtype = {FloatType.FLOAT16: np.float16, FloatType.BFLOAT16: ml_dtypes.bfloat16}.get(kind, np.float32)
    parts = [BODIES[op_type].format(k=k) for k, op_type in enumerate(op_types)]
    parts += [f"b{k} = Cast <to=1> (y{k})" for k in range(len(op_types))]
    results = ", ".join(f"float[1,8,N{k},M{k}] b{k}" for k in range(len(op_types)))
    text = f"g (float[1,8,16,16] a) => ({results}) {{ x = Cast <to={number}> (a) {' '.join(parts)} }}"
    weights = {"w": np.ones((8, 8, 2, 2), dtype)} if "ConvTranspose" in op_types else {}
    return kernels(parse_text(text, opset=19, ir=9, **weights), folder)


# bfloat16 has none of them.
@pytest.mark.parametrize("kind", [kind for kind in FloatType if BODIES.keys() - MISSING.get(kind, ())])
def test_operators_with_a_kernel(kind: FloatType, tmp_path: Path) -> None:
    """Every operator that the table does not name builds, all beside each other: a start takes longer than a build."""
    taken = [op_type for op_type in sorted(BODIES) if op_type not in MISSING.get(kind, ())]
    assert build_operators(taken, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "op_type"), [(kind, name) for kind, names in MISSING.items() for name in names if name in BODIES]
)
def test_operators_without_a_kernel(kind: FloatType, op_type: str, tmp_path: Path) -> None:
    """Every operator that the table names is refused in that type."""
    with pytest.raises(AssertionError):
        build_operators([op_type], kind, tmp_path)


C3 = "<pads=[1,1,1,1], kernel_shape=[3,3]>"
NET = f"""g (float[1,32,10,10] x) => (float[1,32,10,10] y) {{
    a = Conv {C3}(x, w, b) i = Relu(a) c = Conv {C3}(i, v, b) d = Add(c, i) e = Conv {C3}(d, w, b)
    y = ConvTranspose <pads=[1,1,1,1], kernel_shape=[3,3]> (e, t)
}}"""


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_int8_kernels_stay_and_floats_are_narrow(kind: str, tmp_path: Path) -> None:
    weights = {"w": (32, 32, 3, 3), "v": (32, 32, 3, 3), "b": (32,), "t": (32, 32, 3, 3)}
    samples = {"x": np.random.default_rng(1).standard_normal((4, 32, 10, 10)).astype(np.float32)}
    made = {}
    for one in ("float32", kind):
        overrides = {"effort": "fast", "high_precision": one}
        result = onnxq.quantize(model(NET, weights=weights), samples, "trt-int8", overrides=overrides)
        made[one] = kernels(result.model, tmp_path)
    assert len(made["float32"]) >= len(made[kind]) - 1
    assert [sum(map(runs_int8, found)) for found in made.values()] == [3, 3]
    (deconv,) = (one for one in made[kind] if one.kind == "deconv")
    # bfloat16 has no transposed convolution.
    assert deconv.inputs[0].dtype == ("float16" if kind == "float16" else "float32")


def test_masked_attention_is_one_kernel(tmp_path: Path) -> None:
    """Float32 has two products and a Softmax; a mask of -3.4e38 in float32 does not part them in float16."""
    text = """g (float[1,4,32,16] q, float[1,1,1,32] keep) => (float[1,4,32,16] y) {
        k = Transpose <perm=[0,1,3,2]>(q) s = MatMul(q, k) drop = Sub(one, keep) mask = Mul(drop, lowest)
        m = Add(s, mask) p = Softmax(m) y = MatMul(p, q)
    }"""
    proto = model(text, weights={"one": np.float32(1), "lowest": np.finfo(np.float32).min})
    rng = np.random.default_rng(0)
    keep = np.ones((4, 1, 1, 32), np.float32)
    keep[..., 20:] = 0
    samples = {"q": rng.standard_normal((4, 4, 32, 16)).astype(np.float32), "keep": keep}
    result = onnxq.quantize(proto, samples, "trt-fp16")
    heavy = [one for one in kernels(result.model, tmp_path) if is_heavy(one)]
    assert len(heavy) == 1
    assert "mha" in heavy[0].name
    assert set(list_types(heavy[0].inputs)) == {"float16"}
