"""Models larger than memory, with small ones in their place: read, rounded, written and checked piece by piece."""

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.errors import ModelError
from onnxq.evaluation.agreement import AgreementSums
from onnxq.evaluation.segments import compare_segments, cut_segments
from onnxq.evaluation.selections import find_selections
from onnxq.graph import get_index, light, load, load_model, name_nodes, storage
from onnxq.graph.storage import Spool, StoredArray, is_stub
from onnxq.graph.subgraph import Cutter
from onnxq.passes.equalization import smoothquant
from onnxq.passes.rounding import sequential
from tests.cli.kit import run
from tests.graph.kit import model

WIDTH, LAYERS = 128, 4


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is a large one."""
    monkeypatch.setattr(load, "_WORTH_MAPPING", 1)
    monkeypatch.setattr(light, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(storage, "_WORTH_SPOOLING", 1 << 10)


def make_model(path: Path, *, external: bool, outlier: float = 1.0, layers: int = LAYERS) -> Path:
    """Residual blocks of LayerNormalization, MatMul and Tanh."""
    rng, text, arrays, x = np.random.default_rng(0), "", {}, "x"
    for k in range(layers):
        weight = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8
        weight[3, 5] *= outlier if k == 1 else 1.0
        arrays |= {f"w{k}": weight, f"g{k}": np.ones(WIDTH, np.float32)}
        text += f"""[norm{k}] n{k} = LayerNormalization({x}, g{k}) [matmul{k}] m{k} = MatMul(n{k}, w{k})
            [tanh{k}] t{k} = Tanh(m{k}) [add{k}] x{k} = Add({x}, t{k}) """
        x = f"x{k}"
    proto = model(f"main (float[n,{WIDTH}] x) => (float[n,{WIDTH}] {x}) {{ {text} }}", **arrays)
    onnx.save(proto, path, save_as_external_data=external, location=path.name + "_data", size_threshold=1024)
    return path


def read_parts(path: Path) -> tuple[list[bytes], dict[str, bytes]]:
    """Nodes and stored tensors of a file."""
    model = onnx.load(path)
    nodes = [node.SerializeToString(deterministic=True) for node in model.graph.node]
    return nodes, {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in model.graph.initializer}


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("preset", ["ort-int8-weights", "ort-int4-weights"])
def test_weights_of_a_large_model_are_those_of_a_small_one(
    tmp_path: Path, request: pytest.FixtureRequest, external: bool, preset: str
) -> None:
    source = make_model(tmp_path / "model.onnx", external=external)
    plain = onnxq.quantize(source, None, preset, overrides={"latency": False}, out=tmp_path / "plain.onnx")
    request.getfixturevalue("small_limits")
    done = onnxq.quantize(source, None, preset, overrides={"latency": False}, out=tmp_path / "large.onnx")
    assert plain.report.segments == 0 < done.report.segments
    assert read_parts(tmp_path / "large.onnx") == read_parts(tmp_path / "plain.onnx")
    assert min(check.sqnr_db[0] for check in done.report.checks) > 10
    assert done.report.checks[0].sqnr_db <= done.report.checks[-1].sqnr_db
    onnx.checker.check_model(tmp_path / "large.onnx")


def test_large_weights_stay_in_their_files(tmp_path: Path, small_limits: None) -> None:
    for external in (True, False):
        path = make_model(tmp_path / f"{external}.onnx", external=external)
        model, whole = load_model(path, lazy=True), load_model(path)
        assert sum(map(is_stub, model.proto.graph.initializer)) == LAYERS
        assert model.size_bytes == whole.size_bytes
        assert model.files == whole.files
        # The file may go: what is open stays readable.
        path.with_name(path.name + "_data").unlink(missing_ok=True)
        path.unlink()
        mine, other = get_index(name_nodes(model.light)), get_index(name_nodes(whole.proto))
        for tensor in (
            tensor for node in other.nodes for k in (1,) if (tensor := other.find_input(node, k)) is not None
        ):
            np.testing.assert_array_equal(mine.find_constant(tensor), other.find_constant(tensor))


def test_smoothing_holds_one_weight_at_a_time(tmp_path: Path, small_limits: None) -> None:
    model = name_nodes(load_model(make_model(tmp_path / "model.onnx", external=True, layers=24), lazy=True).light)
    factors = {group.tensor: np.full(WIDTH, 2.0, np.float32) for group in smoothquant.find_groups(get_index(model))}
    assert len(factors) == 24
    gc.collect()
    tracemalloc.start()
    try:
        after = smoothquant.write_smoothing(model, factors)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # In float64 one weight has 131 kB, and all have 3 MB; the graph itself takes some.
    assert peak < 12 * 8 * WIDTH**2
    index = get_index(after)
    weight = index.input_value(index.find_node("matmul3"), 1)
    before = numpy_helper.to_array(onnx.load(tmp_path / "model.onnx").graph.initializer[6])
    np.testing.assert_array_equal(weight, 2 * before)


@pytest.mark.parametrize("preset", ["ort-int8", "ort-w4a8"])
def test_constants_rounded_one_after_another_may_lie_in_a_file(
    tmp_path: Path, small_limits: None, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    source = make_model(tmp_path / "model.onnx", external=True, outlier=30.0)
    samples = {"x": np.random.default_rng(1).standard_normal((24, 16, WIDTH)).astype(np.float32)}
    written: list[int] = []

    class Counted(Spool):
        def write(self, array: np.ndarray) -> StoredArray:
            written.append(array.nbytes)
            return super().write(array)

    def quantize(name: str) -> tuple[list[bytes], dict[str, bytes]]:
        onnxq.quantize(source, samples, preset, overrides={"latency": False, "threads": 1}, out=tmp_path / name)
        return read_parts(tmp_path / name)

    monkeypatch.setattr(sequential, "Spool", Counted)
    spooled = quantize("spooled.onnx")
    # Each weight as it is to the nearest, and as it was rounded.
    assert written == [4 * WIDTH**2] * 2 * LAYERS
    monkeypatch.setattr(sequential, "is_large_model", lambda _: False)
    assert quantize("kept.onnx") == spooled
    assert len(written) == 2 * LAYERS


def test_damaged_files_are_refused_as_ever(tmp_path: Path, small_limits: None) -> None:
    path = make_model(tmp_path / "model.onnx", external=False)
    data = path.read_bytes()
    for damaged in (data[:-100], data[: len(data) // 2], b"\xff" * 200):
        path.write_bytes(damaged)
        with pytest.raises(ModelError) as whole:
            load_model(path)
        with pytest.raises(ModelError) as found:
            load_model(path, lazy=True)
        assert str(found.value) == str(whole.value)
    path = make_model(tmp_path / "parts.onnx", external=True)
    (tmp_path / "parts.onnx_data").write_bytes(b"\0" * 1000)
    with pytest.raises(ModelError, match="too short"):
        load_model(path, lazy=True)


def test_a_segment_shows_its_own_error_and_no_others(tmp_path: Path) -> None:
    before = name_nodes(load_model(make_model(tmp_path / "a.onnx", external=False)).light)
    after = name_nodes(load_model(make_model(tmp_path / "b.onnx", external=False, outlier=4.0)).light)
    segments = cut_segments(before, 1, Cutter(after, computed=True).list_tensors())
    assert [name for one in segments for name in one.nodes] == [node.name for node in before.graph.node]
    assert max(len(one.outputs) for one in segments) <= 2
    rng = np.random.default_rng(1)
    samples = [{"x": rng.standard_normal((n, WIDTH)).astype(np.float32)} for n in (1, 3)]
    agreement = AgreementSums(find_selections(before))
    found = compare_segments(before, after, samples, limit=1, agreement=agreement)
    wrong = [one.segment.nodes for one in found if one.off.worst_db() < 100]
    assert len(wrong) == 1
    assert "matmul1" in wrong[0]
    # The whole in one segment, and what its outputs then are.
    (whole,) = compare_segments(before, after, samples, limit=1 << 30, agreement=agreement)
    assert whole.segment.outputs == (f"x{LAYERS - 1}",)
    assert whole.off.worst_db() < 100


@pytest.mark.usefixtures("small_limits")
def test_commands_find_small_weights_that_lie_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "SMALLEST_STUB", 1)
    network, quantized, plan = make_model(tmp_path / "m.onnx", external=True), tmp_path / "q.onnx", tmp_path / "p.json"
    for command in (
        ("quantize", network, "--config", "ort-int8-weights", "--no-latency", "-o", quantized, "--plan", plan),
        ("apply", network, plan, "--no-latency", "-o", tmp_path / "a.onnx"),
        ("report", network, quantized, "-o", tmp_path / "r.html"),
        ("convert", quantized, "--to", "float", "-o", tmp_path / "f.onnx"),
        ("convert", quantized, "--to", "ort", "--no-latency", "--no-kernels", "-o", tmp_path / "o.onnx"),
        *((name, network, quantized) for name in ("diff", "profile", "compare")),
        ("inspect", quantized),
    ):
        done = run(*command)
        assert done.exit_code == 0, (command, done.output)
    assert (tmp_path / "a.onnx").read_bytes() == quantized.read_bytes()
