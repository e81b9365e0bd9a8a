"""Small models in ONNX's text form, the passes one by one, and what ORT computes of a model."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, helper, parser

from onnxq.config import Config
from onnxq.graph import GraphIndex, Model, infer_shapes, name_nodes
from onnxq.graph.precision.widen import SourceTypes
from onnxq.passes import registry
from onnxq.passes.base import RunContext
from onnxq.passes.journal import PassReport
from onnxq.passes.state import FloatState
from tests.networks import add_arrays, open_session, parse_text

Array = NDArray[np.generic]
T = TypeVar("T")
Run = Callable[[RunContext, FloatState], tuple[FloatState, PassReport]]


def parse(text: str, opset: int = 17, **arrays: Array | float) -> ModelProto:
    """A model of `text` with initializers (Python numbers become float32 scalars); a "[..] x => y" graph text."""
    proto = parse_text(text, "com.microsoft", opset=opset, **arrays)
    onnx.checker.check_model(proto)
    return name_nodes(proto)


def read_by(text: str, values: Mapping[str, T]) -> dict[str, T]:
    """Those of the values whose names stand in the text."""
    words = set(re.findall(r"\w+", text))
    return {name: value for name, value in values.items() if name in words}


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """Seeded arrays that keep the size of what they multiply."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        for name, shape in shapes.items()
    }


def body(text: str, **arrays: Array | float) -> GraphProto:
    """A graph of `text`, for a branch of an If."""
    graph = parser.parse_graph(text)
    add_arrays(graph, **arrays)
    return graph


def in_branch(model: ModelProto) -> ModelProto:
    """The same computation inside the then-branch of an If; inputs are captured, initializers lie in the branch."""
    inner = GraphProto()
    inner.CopyFrom(model.graph)
    names = [value.name for value in inner.input]
    shaped = list(inner.input)
    del inner.input[:]
    outer_outputs = [onnx.ValueInfoProto(name=f"{value.name}_if", type=value.type) for value in inner.output]
    other = helper.make_graph(
        [helper.make_node("Identity", [names[0]], [f"{v.name}_else"]) for v in inner.output],
        "other",
        [],
        [onnx.ValueInfoProto(name=f"{value.name}_else") for value in inner.output],
    )
    for value in other.output:
        value.type.CopyFrom(outer_outputs[0].type)
    node = helper.make_node(
        "If", ["flag"], [v.name for v in outer_outputs], name="branch", then_branch=inner, else_branch=other
    )
    for value in outer_outputs:
        for k, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{k}"
    flag = helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, [])
    graph = helper.make_graph([node], "outer", [flag, *shaped], outer_outputs)
    return name_nodes(helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=8))


def make_state(model: ModelProto, computes: int = 0) -> FloatState:
    """The state of a model. computes: the narrow ONNX type that it came in."""
    return FloatState(Model(model, None, 0), model, model, SourceTypes(computes=computes))


def apply(run: Run, model: ModelProto, target: str = "ort", skip: Iterable[str] = ()) -> tuple[ModelProto, PassReport]:
    """One pass on a model with inferred shapes."""
    ctx = RunContext(config=Config.model_validate({"target": target}), skip=frozenset(skip))
    after, report = run(ctx, make_state(infer_shapes(model)))
    onnx.checker.check_model(after.model)
    return after.model, report


def ops(model: ModelProto) -> Counter[str]:
    """How many nodes of each type, in all scopes."""
    return Counter(node.op_type for node in GraphIndex(name_nodes(model)).nodes)


def infer(model: ModelProto, feeds: Mapping[str, Array], optimize: bool = False) -> list[Array]:
    """What ORT computes."""
    return list(open_session(model, optimize=optimize).run(None, dict(feeds)))


def feeds_for(model: ModelProto, seed: int = 0) -> dict[str, Array]:
    """Random data for every input; symbolic dimensions become 3, booleans True."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        shape = [dim.dim_value if dim.HasField("dim_value") else 3 for dim in tensor.shape.dim]
        data = rng.standard_normal(shape) * 2.0
        feeds[value.name] = np.ones(shape, bool) if dtype == np.bool_ else data.astype(dtype)
    return feeds


def assert_same(before: ModelProto, after: ModelProto, rtol: float = 2e-6, seed: int = 0) -> None:
    """Both compute the same within rounding: `rtol` of each output's largest value; names and types are kept."""
    assert [v.name for v in before.graph.input] == [v.name for v in after.graph.input]
    assert [v.name for v in before.graph.output] == [v.name for v in after.graph.output]
    feeds = feeds_for(before, seed)
    for old, new in zip(infer(before, feeds), infer(after, feeds), strict=True):
        assert old.dtype == new.dtype
        assert old.shape == new.shape
        wide_old, wide_new = old.astype(np.float64), new.astype(np.float64)
        limit = rtol * max(1e-3, float(np.abs(wide_old).max(initial=0.0)))
        np.testing.assert_allclose(wide_new, wide_old, rtol=0, atol=limit)


def assert_changed(
    run: Run, model: ModelProto, target: str = "ort", rtol: float = 2e-6, seed: int = 0
) -> tuple[ModelProto, PassReport]:
    """The pass changes something, and the model computes the same. Gives it and the report."""
    result, report = apply(run, model, target)
    assert report.changed
    assert_same(model, result, rtol, seed)
    return result, report


def assert_rewritten(
    run: Run, model: ModelProto, wanted: Mapping[str, int], rtol: float = 2e-6, target: str = "ort", seed: int = 0
) -> tuple[ModelProto, PassReport]:
    """The pass leaves nodes of these types, which compute the same. Gives the model and the report."""
    result, report = assert_changed(run, model, target, rtol, seed)
    assert ops(result) == wanted
    return result, report


def assert_untouched(run: Run, model: ModelProto) -> PassReport:
    """The pass changes nothing: same nodes, same weights."""
    typed = infer_shapes(model)
    result, report = apply(run, model)
    assert not report.changed
    before, after = ([n.SerializeToString(deterministic=True) for n in one.graph.node] for one in (typed, result))
    assert after == before
    return report


class Rewritten(NamedTuple):
    """A model after the rewrites, and the report of each."""

    proto: ModelProto
    reports: list[PassReport]


def rewrite_model(model: ModelProto, *, skip: Iterable[str] = (), target: str = "ort", computes: int = 0) -> Rewritten:
    """All rewrites for a target but those of `skip`."""
    ctx = RunContext(config=Config(target=target), skip=frozenset(skip))
    return Rewritten(registry.rewrite_model(ctx, make_state(model, computes)).model, ctx.journal)


def prepared(model: ModelProto) -> ModelProto:
    """The model after all passes, checked."""
    result = rewrite_model(model)[0]
    onnx.checker.check_model(result)
    return result


def constant(model: ModelProto, node: str, k: int) -> Array:
    """The constant input k of a node."""
    index = GraphIndex(model)
    ref = index.find_node(node)
    return index.find_constant(index.resolve_tensor(ref.inputs[k], ref.scope))
