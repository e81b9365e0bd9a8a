"""Requested specs that a target refuses: subject, cause, fix and code, operator by operator."""

import pytest

from onnxq.sites import Refusal
from tests.planner.kit import draft, network

CONV = "g (float[1,8,9,9] x) => (float[1,16,A,B] y) { y = Conv(x, w) }"
MATMUL = "g (float[4,96] x) => (float[4,16] y) { y = MatMul(x, w) }"
GEMM = "g (float[4,96] x) => (float[4,16] y) { y = Gemm(x, w) }"
SHAPES = {CONV: (16, 8, 3, 3), MATMUL: (96, 16), GEMM: (96, 16)}


def refused(text: str, *rules: dict, weight: tuple[int, ...] = (), **wish: object) -> Refusal | None:
    """The only refusal of the only operator, which is then left out of the plan."""
    problem = draft(network(text, w=weight or SHAPES[text]), *rules, **wish)  # type: ignore[arg-type]
    plan = problem.default()
    assert dict(problem.refused) == {one.subject: one for one in plan.refusals}
    assert not plan.refusals or plan.sites == ()
    return problem.refused.get("y")  # type: ignore[return-value]


NARROW = "2/3/4/5/6/7/8 bits"
ORT_WEIGHTS = (
    f"use {NARROW}, symmetric, int8, per tensor or per channel; or 2/3/4 bits, symmetric, int4, per tensor or per "
    f"channel; or {NARROW}, symmetric/asymmetric, uint8/int8, per tensor or per channel; or 16 bits, symmetric, int16, "
    "per tensor or per channel"
)
ORT_ACTIVATIONS = (
    "use 8 bits, symmetric/asymmetric, uint8/int8, per tensor; or 2/3/4/5/6/7 bits, symmetric/asymmetric, uint8/int8, "
    "per tensor; or 16 bits, symmetric/asymmetric, uint16/int16, per tensor"
)
UINT4 = {"weights.bits": 4, "weights.storage": "uint4", "weights.signed": False, "weights.scheme": "asymmetric"}


@pytest.mark.parametrize(("text", "wish", "reason", "fix"), [
    (CONV, UINT4, "ort has no Conv kernel for 4-bit asymmetric uint4 per channel weights", ORT_WEIGHTS),
    (CONV, {"activations.bits": 4, "activations.storage": "uint4"},
     "ort has no Conv kernel for 4-bit asymmetric uint4 per tensor activations", ORT_ACTIVATIONS),
    (GEMM, {"preset": "ort-int4-weights"}, "ort has no Gemm kernel for 8-bit asymmetric uint8 per block weights",
     f"use {NARROW}, symmetric/asymmetric, int8/uint8, per tensor or per channel"),
    (MATMUL, {"preset": "trt-int4-weights"},
     "its 96 rows do not make whole blocks of 128", "use block_size 32 for it"),
    (MATMUL, {"preset": "ort-int4-weights", "weights.block_size": 512},
     "ONNX Runtime before 1.27 computes garbage in blocks of 512, and 1.27 and 1.28 load none", "use block_size 256"),
])  # fmt: skip
def test_a_spec_without_a_kernel_is_refused_naming_those_with_one(text: str, wish: dict, reason: str, fix: str) -> None:
    assert refused(text, **wish) == Refusal(
        "y", reason, fix, {CONV: "conv", MATMUL: "matmul", GEMM: "gemm"}[text], "R103"
    )


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        (CONV, {}),
        (CONV, {"weights.bits": 3, "activations.bits": 5}),
        (MATMUL, {"preset": "ort-int4-weights"}),
        (MATMUL, {"preset": "trt-int4-weights", "weights.block_size": 32}),
        (CONV, {"preset": "trt-fp8"}),
        (CONV, {"preset": "virtual-int8", "weights.bits": 5, "activations.bits": 16}),
        # Activations that are not quantized may be wished as they like.
        (MATMUL, {"preset": "ort-int8-weights", "activations.storage": "uint4", "activations.bits": 4}),
    ],
)
def test_what_has_a_kernel_is_not_refused(text: str, wish: dict) -> None:
    assert refused(text, **wish) is None


@pytest.mark.parametrize(("kernel", "fits"), [((5, 5), True), ((4, 8), True), ((3, 11), False), ((6, 6), False)])
def test_tensorrt_has_fp8_kernels_of_at_most_32_taps(kernel: tuple[int, int], fits: bool) -> None:
    text = "g (float[1,8,16,16] x) => (float[1,16,A,B] y) { y = Conv(x, w) }"
    found = refused(text, weight=(16, 8, *kernel), preset="trt-fp8")
    taps = kernel[0] * kernel[1]
    reason = f"its kernel has {taps} taps: beyond 32 TensorRT convolves in float, not in FP8"
    assert found == (None if fits else Refusal("y", reason, "it stays float", "conv", "R103"))


@pytest.mark.parametrize("role", ["weight", "activation"])
def test_fp8_multiplies_fp8(role: str) -> None:
    found = refused(CONV, {"op": "Conv", "role": role, "set": {"storage": "int8"}}, preset="trt-fp8")
    assert found.reason == "trt multiplies FP8 by FP8 and integers by integers, nothing else"
    assert found.fix == "ask for the same storage for its input and its weight"
    assert refused(CONV, {"op": "Conv", "set": {"storage": "int8"}}, preset="trt-fp8") is None


def test_a_granularity_without_an_axis_is_refused_by_its_name() -> None:
    found = refused(MATMUL, {"tensor": "x", "set": {"granularity": "channel"}}, preset="virtual-int8")
    assert found == Refusal(
        "y", "granularity 'channel': this tensor has no channel axis", "ask for granularity: tensor", "matmul", "R103"
    )


def test_one_refused_input_does_not_keep_the_others_from_their_neighbours() -> None:
    text = "g (float[1,64,28,28] x) => (float[1,64,28,28] y) { a = Conv(x, w) b = Conv(a, v) y = Conv(b, w) }"
    proto = network(text, w=(64, 64, 1, 1), v=(64, 64, 1, 1))
    few = {"tensor": "v", "set": {"bits": 4, "storage": "uint4", "signed": False, "scheme": "asymmetric"}}
    problem = draft(proto, few, {"op": "*", "set": {"quantize": True}})
    plan = problem.default()
    assert set(problem.refused) == {"b"}
    assert {str(site.site) for site in plan.sites} == {"x", "w", "a", "b", "y"}
    assert plan.float_nodes == ("b",)
