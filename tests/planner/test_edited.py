"""Sites that a person added, changed or took out of a plan: what goes with them, and what no longer fits its tensor."""

from functools import lru_cache

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxq.errors import PlanError
from onnxq.graph import GraphIndex
from onnxq.plan import SitePlan
from onnxq.planner import digest_weights, find_needed_opset
from onnxq.planner.match import check_site, drop_orphans
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, QuantSpec
from tests.planner.kit import network, site


@lru_cache(maxsize=1)
def index() -> GraphIndex:
    text = "g (float[4,8] x, float16[4] h) => (float[4,8] y, float[4,8] u, float16[4] k) {"
    return GraphIndex(network(f"{text} y = Gemm(x, w, b) u = MatMul(x, w) k = Neg(h) }}", w=(8, 8), b=(8,)))


X, W, B = TensorId("x"), TensorId("w"), TensorId("b")


@pytest.mark.parametrize(
    ("held", "existing", "kept", "missing"),
    [
        (("x", "w", "b"), (), ["x", "w", "b"], None),
        (("x", "b"), (), ["x"], "w"),
        (("w", "b"), (), ["w"], "x"),
        (("b",), (), [], "x"),
        # A pair that the model came with is as good as a site.
        (("w", "b"), ("x",), ["w", "b"], None),
    ],
)
def test_a_bias_goes_with_what_its_scale_follows_from(
    held: tuple[str, ...], existing: tuple[str, ...], kept: list[str], missing: str | None
) -> None:
    sites = tuple(site(name, derived=(X, W) if name == "b" else None) for name in held)
    left, lines = drop_orphans(sites, [site(name) for name in existing])
    assert [str(one.site) for one in left] == kept
    assert [(line.code, str(line)) for line in lines] == [
        ("W121", f"b: left float, its scale follows from {missing}, which is not in the plan")
    ] * (missing is not None)


def test_weights_get_the_readers_that_nobody_named() -> None:
    found = [site("w", Role.WEIGHT), site(Edge("y", 2), Role.BIAS), site("x")]
    assert [check_site(one, index()).consumers for one in found] == [
        (Edge("y", 1), Edge("u", 1)),
        (Edge("y", 2),),
        None,
    ]
    named = site("w", Role.WEIGHT, consumers=(Edge("u", 1),))
    assert check_site(named, index()) == named


FAULTS = {
    "a computed bias": (site("x", Role.BIAS), "Q404", "as a bias is"),
    "an axis below the first": (
        site("w", Role.WEIGHT, spec=QuantSpec(granularity=PerBlock(-3, 4))), "Q403", "axis -3 is outside",
    ),
    "values of an activation": (site("x", values=np.zeros((4, 8), np.int8)), "Q408", "do not fit a computed tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("found", "code", "cause"), FAULTS.values(), ids=FAULTS)
def test_sites_that_do_not_fit_their_tensor(found: SitePlan, code: str, cause: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_site(found, index())
    assert (caught.value.subject, caught.value.code) == (str(found.site), code)
    assert cause in caught.value.cause
    assert caught.value.fix


@pytest.mark.parametrize("axis", [-2, 0, 1])
def test_axes_inside_the_shape_are_taken(axis: int) -> None:
    found = site("w", Role.WEIGHT, spec=QuantSpec(granularity=PerChannel(axis)), values=np.zeros((8, 8), np.int8))
    assert check_site(found, index()).values is found.values


@pytest.mark.parametrize(
    ("found", "opset"),
    [
        ([], 13),
        ([site("x")], 13),
        ([site("x", spec=QuantSpec(bits=16))], 21),
        ([site("w", spec=QuantSpec(bits=4, storage="int4"))], 21),
        ([site("w", spec=QuantSpec(granularity=PerBlock(0, 4)))], 21),
        ([site("x", spec=QuantSpec(storage="float8e4m3fn"))], 19),
        ([site("x", spec=QuantSpec(storage="float8e4m3fn")), site("x", spec=QuantSpec(bits=16))], 21),
    ],
)
def test_the_opset_that_pairs_need(found: list[SitePlan], opset: int) -> None:
    assert find_needed_opset(found) == opset


def digest(*values: np.ndarray) -> str:
    proto = onnx.ModelProto()
    proto.graph.name = "g"
    names = [f"w{k}" for k in range(len(values))]
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for v, n in zip(values, names, strict=True))
    return digest_weights([site(name, Role.WEIGHT) for name in names] + [site("elsewhere")], GraphIndex(proto))


def test_the_digest_tells_values_types_shapes_and_order() -> None:
    one, two = np.arange(6, dtype=np.float32), np.ones(2, np.float32)
    same = digest(one, two)
    assert same == digest(one.copy(), two.copy())
    changed = [(two, one), (one,), (one.reshape(2, 3), two), (one.astype(np.float64), two), (one + 1, two)]
    assert len({same, *(digest(*values) for values in changed)}) == len(changed) + 1


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_the_digest_is_of_the_float32_network_that_a_narrow_one_is_widened_to(kind: type) -> None:
    one = np.arange(6, dtype=np.float32)
    assert digest(one.astype(kind)) == digest(one)
