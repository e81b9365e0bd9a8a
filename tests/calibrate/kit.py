"""Small models, plans by hand, and what numpy says the numbers are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx

from onnxq.data import Dataset, load_data
from onnxq.graph import GraphIndex
from onnxq.plan import Plan, SitePlan
from onnxq.sites import Role, Site, TensorId
from onnxq.spec import ObserverSpec, QuantSpec
from tests.networks import parse_text

U8 = QuantSpec(signed=False, symmetric=False)


def model(text: str, **arrays: Any) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(parse_text(text, **arrays), data_prop=True)


def dataset(proto: onnx.ModelProto, source: Any) -> Dataset:
    return load_data(source, GraphIndex(proto).inputs)


def site(where: Site | str, observer: str | ObserverSpec = "minmax", **given: Any) -> SitePlan:
    target = TensorId(where) if isinstance(where, str) else where
    wanted = ObserverSpec(observer) if isinstance(observer, str) else observer
    return SitePlan(**{"site": target, "role": Role.ACTIVATION, "spec": U8, "observer": wanted, **given})


def plan(*sites: SitePlan) -> Plan:
    return Plan(target="ort", model="m", topology="", weights="", sites=sites)


def numbers(found: Plan) -> list[tuple[bytes, bytes] | None]:
    return [
        None if s.qparams is None else (s.qparams.scale.tobytes(), s.qparams.zero_point.tobytes()) for s in found.sites
    ]


def scale_of(low: float, high: float) -> np.float32:
    return np.float32((max(high, 0.0) - min(low, 0.0)) / 255)


def watch_steps(
    advance: Callable[[int], object], begin: Callable[[int | None], object] = lambda _: None
) -> Callable[..., AbstractContextManager[Any]]:
    """A progress whose steps are handed on, and the number of them as it begins."""

    @contextmanager
    def progress(description: str, total: int | None = None) -> Iterator[Any]:
        begin(total)
        yield SimpleNamespace(advance=lambda steps=1: advance(steps))

    return progress


# Additions and products of small integers: exact in float32 whatever the batch and the kernel.
EXACT = model(
    """g (float[N,3,4] x) => (float[N,3,4] y) <float[3,1] w = {1, -2, 3}, float[4,4] m = {
        1, 0, 2, 0,  0, 1, 0, -1,  3, 0, 1, 0,  0, 0, 0, 2}> {
        [scale] a = Mul(x, w) [relu] b = Relu(a) [mix] c = MatMul(b, m) [skip] y = Add(c, x) }"""
)
EXACT_SITES: Sequence[str] = ("x", "a", "b", "c", "y")


def integers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-40, 40, (count, 3, 4)).astype(np.float32)
