"""Sessions: what they tell, and how ONNX Runtime's failures reach a person."""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from onnxq.errors import DataError, MissingDependencyError, ModelError
from onnxq.graph import ModelLike, ValueInfo, bare_proto, save_model, strip_weights
from onnxq.numerics import machine
from onnxq.runtime import Session, trim_memory
from onnxq.runtime import session as session_module
from onnxq.runtime.session import import_onnxruntime, list_faults, make_session_options, optimize_graph
from tests.networks import parse_text

X = np.arange(8, dtype=np.float32).reshape(2, 4) - 3

RELU = parse_text("g (float[N,4] x) => (float[N,4] y) { [act] y = Relu(x) }")
GATHER = parse_text("g (float[4] x, int64[K] i) => (float[K] y) { [pick] y = Gather(x, i) }")


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("arena", [True, False])
def test_runs_by_name(optimize: bool, arena: bool) -> None:
    session = Session(RELU, optimize=optimize, arena=arena, threads=1)
    assert session.inputs == (ValueInfo("x", TensorProto.FLOAT, ("N", 4)),)
    assert session.outputs == (ValueInfo("y", TensorProto.FLOAT, ("N", 4)),)
    np.testing.assert_array_equal(session.run({"x": X})["y"], np.maximum(X, 0))


def test_runs_a_file_and_selected_outputs(tmp_path: Path) -> None:
    two = parse_text("g (float[N,4] x) => (float[N,4] y, float[N,4] z) { y = Relu(x) z = Neg(x) }")
    path = tmp_path / "two.onnx"
    onnx.save(two, path)
    before = path.read_bytes()
    found = Session(path).run({"x": X}, ["z"])
    assert list(found) == ["z"]
    np.testing.assert_array_equal(found["z"], -X)
    assert path.read_bytes() == before


def test_takes_scalars_and_views_that_are_not_contiguous() -> None:
    scale = parse_text("g (float[N,4] x, float s) => (float[N,4] y) { y = Mul(x, s) }")
    found = Session(scale).run({"x": np.asfortranarray(X), "s": np.float32(2)})
    np.testing.assert_array_equal(found["y"], 2 * X)


@pytest.mark.parametrize("hold", [bare_proto, strip_weights])
def test_model_too_large_for_protobuf_goes_through_a_file(
    hold: Callable[[onnx.ModelProto], ModelLike], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = np.random.default_rng(0).standard_normal((4, 1024)).astype(np.float32)
    proto = parse_text("g (float[N,4] x) => (float[N,1024] y) { [mm] y = MatMul(x, w) }")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    before = proto.SerializeToString(deterministic=True)
    monkeypatch.setattr(session_module, "ONE_MESSAGE", 0)
    np.testing.assert_allclose(Session(hold(proto)).run({"x": X})["y"], X @ weight, rtol=1e-5)
    path = tmp_path / "model.onnx"
    save_model(proto, path, external=True)
    for source in (hold(proto), path):
        (kept,) = optimize_graph(source).graph.initializer
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(kept), weight)
    assert proto.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("feeds", "kind", "told"),
    [
        ({"x": np.zeros((2, 5), np.float32)}, DataError, ["'x'", "axis 1 has 5", "wants 4"]),
        ({"x": np.zeros(2, np.float32)}, DataError, ["'x'", "1 dimensions", "wants 2"]),
        ({"x": np.zeros((2, 4), np.float64)}, DataError, ["'x'", "float64", "wants float"]),
        ({"y": np.zeros((2, 4), np.float32)}, DataError, ["'y'", "no such input", "known: x"]),
        ({}, DataError, ["'x'", "not given"]),
    ],
)
def test_wrong_feeds_name_the_input(feeds: dict[str, np.ndarray], kind: type[Exception], told: list[str]) -> None:
    with pytest.raises(kind) as raised:
        Session(RELU).run(feeds)
    for part in told:
        assert part in str(raised.value)


@pytest.mark.parametrize(("name", "dtype"), [("float8e4m3fn", "float8_e4m3fn"), ("int4", "int4")])
def test_types_that_are_not_numpys_own_are_named(name: str, dtype: str) -> None:
    text = f"g ({name}[4] x) => (float[4] y) {{ y = Cast<to = 1>(x) }}"
    session = Session(parse_text(text, opset=21, ir=10))
    with pytest.raises(DataError, match=f"is {dtype}, which ONNX Runtime does not take from Python") as caught:
        session.run({"x": np.ones(4, getattr(ml_dtypes, dtype))})
    assert (caught.value.subject, caught.value.code) == ("input 'x'", "Q210")


def test_a_failing_node_is_named_and_nothing_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError) as raised:
        Session(GATHER).run({"x": np.zeros(4, np.float32), "i": np.array([7])})
    assert raised.value.subject == "node 'pick' (Gather)"
    assert "out of data bounds" in raised.value.cause
    assert capfd.readouterr() == ("", "")


def test_the_innermost_failing_node_is_named() -> None:
    nested = parse_text(
        """g (bool c, float[4] x, int64[K] i) => (float[M] y) {
            [choice] y = If (c) <
                then_branch = a () => (float[M] p) { [inner_pick] p = Gather(x, i) },
                else_branch = b () => (float[M] q) { [other] q = Relu(x) }>
        }"""
    )
    feeds = {"c": np.array(True), "x": np.zeros(4, np.float32), "i": np.array([9])}
    with pytest.raises(ModelError, match="inner_pick"):
        Session(nested, optimize=False).run(feeds)


def test_an_unknown_operator_is_named() -> None:
    wrong = onnx.ModelProto.FromString(RELU.SerializeToString())
    wrong.graph.node[0].op_type = "Reluu"
    with pytest.raises(ModelError) as raised:
        Session(wrong)
    assert raised.value.subject == "node 'act' (Reluu)"


def test_files_that_are_no_models(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model at all")
    with pytest.raises(ModelError, match=r"broken\.onnx"):
        Session(broken)
    with pytest.raises(ModelError, match="no such file"):
        Session(tmp_path / "absent.onnx")


def test_floats_between_pairs_stay_floats_where_pairs_are_not_fused(tmp_path: Path) -> None:
    pairs = parse_text("""g (float[1,2,4,4] x) => (float[1,2,4,4] y)
            <float s = {0.1}, uint8 z = {128}, int8[2,2,1,1] w = {1,2,3,4}, float t = {0.5}, int8 o = {0}> {
          xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) wd = DequantizeLinear(w, t, o)
          h = Conv(xd, wd) yq = QuantizeLinear(h, s, z) y = DequantizeLinear(yq, s, z) }""")
    feeds = {"x": np.linspace(-9, 9, 32, dtype=np.float32).reshape(1, 2, 4, 4)}
    ops = {}
    for fuse in (True, False):
        path = tmp_path / f"{fuse}.onnx"
        outputs = Session(pairs, fuse_pairs=fuse, save_optimized=path).run(feeds)
        ops[fuse] = {node.op_type for node in onnx.load(path).graph.node}
    assert "QLinearConv" in ops[True]
    assert "QLinearConv" not in ops[False]
    np.testing.assert_allclose(outputs["y"], Session(pairs, optimize=False).run(feeds)["y"], rtol=1e-6)


def test_a_relu_in_front_of_floats_of_8_bits_stays() -> None:
    """Where zero is the lowest integer saturation does what it does, and ONNX Runtime takes it away."""
    text = "g (float[8] x) => (float[8] y) { r = Relu(x) q = QuantizeLinear(r, s, z) y = DequantizeLinear(q, s, z) }"
    pair = parse_text(text, opset=21, ir=10, s=0.01, z=np.zeros((), ml_dtypes.float8_e4m3fn))
    assert Session(pair, fuse_pairs=False).run({"x": X.reshape(-1)})["y"].min() == 0.0


def test_importing_the_room_does_not_load_onnxruntime() -> None:
    code = "import sys, onnxq.runtime, onnxq.data, onnxq.calibrate; print('onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_output_that_is_an_input_outlasts_the_session() -> None:
    """ONNX Runtime 1.23 hands out memory that the next session takes."""
    text = "g (float[N,64] x) => (float[N,64] x, float[N,64] y) { y = Relu(x) }"
    outputs = Session(parse_text(text)).run({"x": np.ones((3, 64), np.float32)})
    others = [Session(parse_text(text)).run({"x": np.zeros((3, 64), np.float32)}) for _ in range(8)]
    assert outputs["x"].min() == 1
    assert len(others) == 8


# ---- Options of sessions: quiet, without spinning, as optimized and as thrifty as asked for.

LEVEL = onnxruntime.GraphOptimizationLevel


@pytest.mark.parametrize(
    ("asked", "level"),
    [
        ({"optimize": True}, LEVEL.ORT_ENABLE_ALL),
        ({"optimize": True, "layout": False}, LEVEL.ORT_ENABLE_EXTENDED),
        ({"optimize": False}, LEVEL.ORT_DISABLE_ALL),
        ({"optimize": False, "layout": False}, LEVEL.ORT_DISABLE_ALL),
    ],
)
def test_levels_of_optimization(asked: dict[str, Any], level: object) -> None:
    options = make_session_options(threads=2, **asked)
    assert options.graph_optimization_level == level
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)
    assert options.log_severity_level == 4
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_memory_goes_back_to_the_system_without_an_arena() -> None:
    usual, thrifty = (make_session_options(optimize=True, threads=0, arena=arena) for arena in (True, False))
    assert (usual.enable_cpu_mem_arena, usual.enable_mem_pattern) == (True, True)
    assert (thrifty.enable_cpu_mem_arena, thrifty.enable_mem_pattern) == (False, False)


def test_shapes_run_first_and_the_optimized_graph_is_written_where_asked(tmp_path: Path) -> None:
    plain = make_session_options(optimize=True, threads=0)
    asked = make_session_options(optimize=True, threads=0, shapes_first=True, save=tmp_path / "o.onnx")
    order = onnxruntime.ExecutionOrder
    assert (plain.execution_order, asked.execution_order) == (order.DEFAULT, order.PRIORITY_BASED)
    assert (plain.optimized_model_filepath, asked.optimized_model_filepath) == ("", str(tmp_path / "o.onnx"))


def test_every_fault_of_onnxruntime_is_caught() -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, NoSuchFile

    assert {Fail, InvalidArgument, NoSuchFile, ValueError, MemoryError} <= set(list_faults())
    assert not issubclass(KeyboardInterrupt, list_faults())


@pytest.mark.parametrize(
    ("there", "cause"),
    [(None, "cannot be imported"), (ModuleType("onnxruntime"), "is damaged: several of its packages")],
)
def test_a_missing_or_damaged_package_is_an_install_line(
    monkeypatch: pytest.MonkeyPatch, there: ModuleType | None, cause: str
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", there)
    with pytest.raises(MissingDependencyError, match=r"\[Q801\]") as caught:
        import_onnxruntime()
    assert cause in caught.value.cause
    assert "never both" in caught.value.fix
    assert there or 'pip install "onnxq[cpu]"' in caught.value.fix


# ---- Freed memory goes back to the system; where the C library has no such call, nothing happens.


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """The call is looked up once for each process."""
    machine._find_trim.cache_clear()
    yield
    machine._find_trim.cache_clear()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_trim is of glibc")
def test_the_c_library_is_asked_with_nothing_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Library:
        malloc_trim = staticmethod(asked.append)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library)
    trim_memory()
    trim_memory()
    assert asked == [0, 0]


@pytest.mark.parametrize("fault", [OSError, AttributeError])
def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch, fault: type[Exception]) -> None:
    def without(_: object) -> object:
        raise fault

    monkeypatch.setattr(ctypes, "CDLL", without)
    trim_memory()


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    trim_memory()
