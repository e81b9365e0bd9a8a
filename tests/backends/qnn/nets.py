"""Small float networks whose placement for Qualcomm's NPU is known, each with a rule at work, as one model."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import onnx

from onnxq.graph import name_nodes
from tests.networks import parse_text
from tests.passes.kit import Array


@dataclass(frozen=True)
class Net:
    """One of the networks: sizes of its input and its output, its nodes, and what becomes of them.

    pairs: tensors with a pair; those between commas share one scale. constants: shapes of random ones, or values.
    """

    x: str
    y: str
    nodes: str
    pairs: str
    constants: dict[str, tuple[int, ...] | Array] = field(default_factory=dict)
    weights: str = ""
    biases: str = ""


_FAR = float(np.finfo(np.float32).min)
NETS = {
    "conv and relu": Net(
        "float[1,3,8,8] cx", "float[1,8,6,6] cy", "c = Conv(cx, cw, cb) cy = Relu(c)", "cx cy",
        {"cw": (8, 3, 3, 3), "cb": (8,)}, "cw", "cb",
    ),
    # Another reader needs the sum in front of the Relu, which becomes a node of its own.
    "relu of a branch": Net(
        "float[1,8] bx", "float[1,8] by", "b = Gemm(bx, bw) br = Relu(b) by = Mul(b, br)", "bx b br by",
        {"bw": (8, 8)}, "bw",
    ),
    "residual and constant": Net(
        "float[1,8,8,8] rx", "float[1,8,8,8] ry",
        "r = Conv<pads=[1,1,1,1]>(rx, rw, rb) ra = Add(r, rx) rk = Add(ra, rt) ry = Relu(rk)", "rx r ra rt ry",
        {"rw": (8, 8, 3, 3), "rb": (8,), "rt": (1, 8, 8, 8)}, "rw", "rb",
    ),
    "tables": Net(
        "float[1,8] tx", "float[1,8] ty",
        "ts = Sigmoid(tx) tt = Tanh(tx) th = HardSigmoid(tx) tm = Mul(ts, tt) ty = Mul(tm, th)", "tx ts tt th tm ty",
    ),
    "class token": Net(
        "float[1,4,16] px", "float[1,5,16] py", "p = Concat<axis=1>(pt, px) py = MatMul(p, pw)", "px pt p py",
        {"pt": (1, 1, 16), "pw": (16, 16)}, "pw",
    ),
    "split": Net(
        "float[1,4,24] sx", "float[1,4,8] sy",
        "s = MatMul(sx, sw) s0, s1, s2 = Split<axis=-1>(s, thirds) sd = Add(s0, s1) sy = Mul(sd, s2)",
        "sx s,s0/part,s1/part,s2/part sd sy", {"sw": (24, 24), "thirds": np.array([8, 8, 8])}, "sw",
    ),
    # LayerNormalization has 16 bits in any case, and those that read it or its input convert.
    "attention": Net(
        "float[1,8,16] x", "float[1,8,16] z",
        """n = LayerNormalization<axis=-1>(x, gamma, beta)
        q = MatMul(n, wq) k = MatMul(n, wk) v = MatMul(n, wv)
        qh = Reshape(q, heads) qt = Transpose<perm=[0,2,1,3]>(qh)
        kh = Reshape(k, heads) kt = Transpose<perm=[0,2,3,1]>(kh)
        vh = Reshape(v, heads) vt = Transpose<perm=[0,2,1,3]>(vh)
        a = MatMul(qt, kt) m = Add(a, mask) e = Softmax<axis=-1>(m)
        o = MatMul(e, vt) ot = Transpose<perm=[0,2,1,3]>(o) of = Reshape(ot, flat)
        l = MatMul(of, wo) f = Add(l, x)
        u = MatMul(f, wu) ub = Add(u, bu) h = Gelu(ub)
        d = MatMul(h, wd) z = Add(d, f)""",
        "x gamma n q/MatMul/in0 k/MatMul/in0 v/MatMul/in0 f/Add/in1 q,qh,qt k,kh,kt v,vh,vt a mask m e o,ot,of l "
        "f,f/matrix ub/MatMul,ub h d z",
        {
            "gamma": np.linspace(0.5, 2, 16, dtype=np.float32), "beta": (16,),
            "wq": (16, 16), "wk": (16, 16), "wv": (16, 16), "wo": (16, 16), "wu": (16, 32), "bu": (32,), "wd": (32, 16),
            "heads": np.array([1, 8, 2, 8]), "flat": np.array([1, 8, 16]),
            "mask": np.triu(np.full((1, 1, 8, 8), _FAR, np.float32), 1),
        },
        "wq wk wv wo wu wd", "beta u/MatMul/bias",
    ),
}  # fmt: skip


def make_model(names: Collection[str] = NETS) -> onnx.ModelProto:
    """Networks in one model, side by side; nodes are named after their first output and their operator."""
    rng, nets = np.random.default_rng(0), [NETS[name] for name in names]
    heads = (", ".join(net.x for net in nets), ", ".join(net.y for net in nets))
    nodes = "\n".join(net.nodes for net in nets)
    arrays = {name: value for net in nets for name, value in net.constants.items()}
    for name, value in arrays.items():
        if isinstance(value, tuple):
            arrays[name] = (rng.standard_normal(value) / np.sqrt(value[0])).astype(np.float32)
    return name_nodes(parse_text(f"g ({heads[0]}) => ({heads[1]}) {{ {nodes} }}", opset=20, **arrays))


def make_samples(model: onnx.ModelProto, count: int = 8) -> dict[str, Array]:
    """Normal values for every input of a model, whose first axis is the batch."""
    rng = np.random.default_rng(1)
    sizes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    return {
        name: rng.standard_normal((count, *(dim.dim_value for dim in dims[1:]))).astype(np.float32)
        for name, dims in sizes.items()
    }
