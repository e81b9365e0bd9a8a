"""onnxruntime-web in Node.js: its graph, its answers and times, exact sums, and what is said where it is missing."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import find_engine, find_target
from onnxq.backends.building import serve_process
from onnxq.backends.engine import ENGINE, MODEL, BuildState, Job
from onnxq.backends.web.engine import INSTALL, SERVER, Node, NodeRunner, explain_absence, find_package
from onnxq.emit import write_matrices
from onnxq.errors import DataError, MissingDependencyError, ModelError, VerificationError
from onnxq.graph import name_nodes
from onnxq.runtime import Session
from tests.engines import kit

_ABSENCE = explain_absence()
needs_web = pytest.mark.skipif(_ABSENCE is not None, reason=f"{'; '.join(_ABSENCE or ())}")
WEB = find_engine("web")


def _save(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / MODEL)
    return folder


@needs_web
def test_it_writes_the_graph_that_it_runs(tmp_path: Path) -> None:
    result = WEB.build(Job(), _save(kit.ort_residual(), tmp_path))
    assert (result.state, result.reason) == (BuildState.BUILT, "")
    graph = onnx.load(tmp_path / ENGINE).graph
    kinds = {node.op_type for node in graph.node}
    assert {"QLinearConv", "QLinearAdd"} <= kinds
    # Channels go last in its integer convolutions; float ones are not laid out in blocks, as on other CPUs.
    assert {node.domain for node in graph.node if node.op_type == "QLinearConv"} == {"com.microsoft"}
    assert "ReorderInput" not in kinds


@needs_web
def test_kernels_are_found_by_the_nodes_they_carry_out() -> None:
    proof = onnxq.prove(kit.ort_residual(), overrides={"engine": "web", "require_int8": ["Conv"]})
    assert proof.holds
    assert {node.kind for node in proof.nodes} == {"QLinearConv"}
    assert {site.state for site in proof.sites} == {"fused"}
    assert proof.build.version.startswith("onnxruntime-web 1.")


@needs_web
def test_a_node_that_it_cannot_load_is_named(tmp_path: Path) -> None:
    broken = kit.ort_residual()
    broken.graph.node[0].op_type = "Quantise"
    result = WEB.build(Job(), _save(broken, tmp_path))
    assert (result.state, result.node) == (BuildState.REFUSED, "xq/QuantizeLinear")
    assert "Quantise" in result.reason


def _multiply_extremes() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Products whose neighbours add up to 64770, beyond 16 bits: a matrix, and a convolution of 1x1 and of 3x3."""
    text = """(uint8[1,16] x, uint8[1,16,4,4] m) => (int32[1,8] y, uint8[1,8,4,4] c, uint8[1,8,4,4] d) {
        y = MatMulInteger(x, w)
        c = QLinearConv(m, s, z, k, s, zs, t, z)
        d = QLinearConv <pads=[1,1,1,1]> (m, s, z, l, s, zs, t, z) }"""
    arrays = {
        "w": np.full((16, 8), 127, np.int8),
        "k": np.full((8, 16, 1, 1), 127, np.int8),
        "l": np.full((8, 16, 3, 3), 127, np.int8),
        "s": np.float32(1),
        "t": np.float32(127 * 16 * 9),
        "z": np.uint8(0),
        "zs": np.int8(0),
    }
    feeds = {"x": np.full((1, 16), 255, np.uint8), "m": np.full((1, 16, 4, 4), 255, np.uint8)}
    return kit.graph(text, 17, **arrays), feeds


@needs_web
def test_sums_of_products_are_exact() -> None:
    model, feeds = _multiply_extremes()
    with Node() as node:
        answers = NodeRunner("extremes", node, model).infer(feeds)
    assert (answers["y"] == 255 * 127 * 16).all()
    assert answers["c"].ravel() == pytest.approx(np.full(128, round(255 / 9)))
    # A corner has four of the nine taps.
    assert {answers["d"][0, 0, 0, 0], answers["d"][0, 0, 1, 1]} == {round(255 * 4 / 9), 255}
    # Files keep 16-bit sums all the same, for ONNX Runtime's native kernels.
    assert find_target("web").saturates


@needs_web
def test_answers_are_compared_and_times_measured() -> None:
    model = kit.ort_residual()
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    sample = {"x": np.random.default_rng(0).standard_normal((2, *shape[1:])).astype(np.float32)}
    result = onnxq.diff(model, model, sample, overrides={"engines": ["web", "ort"]})
    assert [run.name for run in result.runs] == ["float", "ort-off", "ort-on", "web"]
    (error,) = (one for one in result.outputs[0].engines if one.run == "web")
    assert error.sqnr_db > 40
    bench = onnxq.bench([model, model], sample, overrides={"engine": "web", "seconds": 0.1})
    assert [one.eager is not None and one.eager.median_ms > 0 for one in bench.models] == [True, True]
    # Nobody waits for a second engine that he did not name.
    assert "web" not in [run.name for run in onnxq.diff(model, model, sample).runs]


@needs_web
def test_a_file_without_integers_is_timed() -> None:
    """Products by matrices make it faster: `unchanged` alone would not say so."""
    draw = np.random.default_rng(0).standard_normal
    text = "(float[n,240,4,4] x) => (float[n,240,4,4] y) { y = Conv <group=240, pads=[1,1,1,1]>(x, w) }"
    model = kit.graph(text, 17, w=draw((240, 1, 3, 3)).astype(np.float32))
    samples = {"x": draw((4, 240, 4, 4)).astype(np.float32)}
    result = onnxq.quantize(model, samples, "web-int8", overrides={"effort": "fast"})
    assert result.plan.sites == ()
    assert result.report.latency.ratio > 1


@needs_web
def test_a_residual_behind_a_product_by_a_matrix_is_a_part_of_its_convolution(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).standard_normal
    floats = {"w": draw((6, 1, 3, 3)), "b": draw(6), "k": draw((6, 6, 1, 1)), "c": draw(6)}
    text = """(float[n,6,4,4] x) => (float[n,6,4,4] y)
        { a = Conv <group=6, pads=[1,1,1,1]>(x, w, b) p = Conv(a, k, c) y = Add(p, x) }"""
    model = kit.graph(text, 17, **{name: array.astype(np.float32) for name, array in floats.items()})
    WEB.build(Job(), _save(write_matrices(name_nodes(model), lambda *_: True), tmp_path))
    assert "Add" not in {node.op_type for node in onnx.load(tmp_path / ENGINE).graph.node}


@needs_web
def test_a_run_that_fails_and_one_that_takes_too_long_are_errors(tmp_path: Path) -> None:
    model = kit.ort_residual()
    with Node() as node:
        runner = NodeRunner("run", node, model)
        with pytest.raises(DataError, match="has 2 dimensions, the model wants 4"):
            runner.infer({"x": np.zeros((1, 1), np.float32)})
    command = ["node", str(SERVER), str(find_package()), "1"]
    with (
        pytest.raises(ModelError, match=r"did not answer within 0\.01 s"),
        serve_process("onnxruntime-web", command, tmp_path, {}, timeout=0.01),
    ):
        pass


def test_a_single_number_is_fed_as_one() -> None:
    with Node() as node:
        request = node.write_feeds({"t": np.array(3, np.int64), "x": np.zeros((2, 3)).T})
    assert [value["dims"] for value in request["inputs"]] == [(), (3, 2)]


def test_a_package_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NODE_PATH", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    obstacle = WEB.find_obstacle()
    assert "onnxruntime-web" in obstacle.reason
    assert obstacle.fix == INSTALL
    with pytest.raises(VerificationError) as caught:
        WEB.demand_device("engine web")
    assert caught.value.fix == INSTALL


def test_node_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependencyError, match=r"Node\.js is not installed") as caught:
        onnxq.prove(kit.ort_residual(), overrides={"engine": "web"})
    assert "nodejs.org" in caught.value.fix


def test_the_package_is_found_as_node_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the folder, and by NODE_PATH."""
    package = tmp_path / "node_modules" / "onnxruntime-web"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "1.30.0"}')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert find_package() == package
    assert WEB.describe_version() == "onnxruntime-web 1.30.0"
    monkeypatch.chdir("/")
    monkeypatch.setenv("NODE_PATH", str(tmp_path / "node_modules"))
    assert find_package() == package


@pytest.mark.skipif(_ABSENCE is not None and "node" in _ABSENCE[0], reason="no Node.js")
def test_the_server_is_valid_javascript() -> None:
    subprocess.run(["node", "--check", str(SERVER)], check=True)


# ---- A quantized file in a page: headless Chromium loads it with onnxruntime-web, and answers as ONNX Runtime does.

# Debian's name of the program, then others'.
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_BROWSER = next(filter(None, map(shutil.which, _PROGRAMS)), None)
# Seconds for the browser to start, to compile WebAssembly and to run the model.
_PATIENCE = 60.0
_PAGE = """<!doctype html><meta charset="utf-8"><script type="module">
const post = (answer) => fetch("/answer", { method: "POST", body: JSON.stringify(answer) });
try {
  const ort = await import("/dist/ort.wasm.min.mjs");
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = "/dist/";
  const session = await ort.InferenceSession.create("/model.onnx", { executionProviders: ["wasm"] });
  const { x, dims } = await (await fetch("/sample.json")).json();
  const { y } = await session.run({ x: new ort.Tensor("float32", Float32Array.from(x), dims) });
  await post({ y: Array.from(y.data), dims: y.dims, agent: navigator.userAgent });
} catch (error) { await post({ error: String(error) }); }
</script>"""


class _Handler(SimpleHTTPRequestHandler):
    """Serves a folder, and keeps what the page sends."""

    answers: Queue[str]

    def guess_type(self, path: str | os.PathLike[str]) -> str:
        """Older Pythons do not know modules and WebAssembly, and Chromium takes neither under another type."""
        types = {".mjs": "text/javascript", ".wasm": "application/wasm"}
        return types.get(Path(path).suffix) or super().guess_type(path)

    def do_POST(self) -> None:
        self.answers.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def _serve(folder: Path) -> Iterator[tuple[str, Queue[str]]]:
    answers: Queue[str] = Queue()
    handler = type("Handler", (_Handler,), {"answers": answers})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/page.html", answers
        finally:
            server.shutdown()
            thread.join()


def _open_page(address: str, answers: Queue[str], profile: Path) -> dict[str, object]:
    # Without a sandbox, which root cannot have; in a profile of its own.
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    with subprocess.Popen([_BROWSER, *options, address], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as browser:
        try:
            return json.loads(answers.get(timeout=_PATIENCE))
        except Empty:
            browser.kill()
            raise AssertionError(f"no answer; Chromium says: {browser.stderr.read().decode()[-2000:]}") from None
        finally:
            browser.kill()


@pytest.mark.skipif(_BROWSER is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.skipif(find_package() is None, reason=f"no npm package onnxruntime-web: {INSTALL}")
def test_a_page_answers_as_onnx_runtime_does(tmp_path: Path) -> None:
    model = kit.graph(
        """(float[1,32,8,8] x) => (float[1,32,8,8] y) {
            c = Conv(x, w) r = Relu(c) d = Conv(r, v) a = Add(d, x) y = Relu(a) }""",
        17,
        w=_draw((32, 32, 1, 1)),
        v=_draw((32, 32, 1, 1)),
    )
    samples = {"x": _draw((8, 32, 8, 8), 2.0)}
    rules = [{"node": "*", "set": {"quantize": True}}]
    result = onnxq.quantize(model, samples, "web-int8", overrides={"effort": "fast", "latency": False, "rules": rules})
    assert result.report.pairs
    site = tmp_path / "site"
    site.mkdir()
    (site / "dist").symlink_to(find_package() / "dist")
    onnx.save(result.model, site / "model.onnx")
    (site / "page.html").write_text(_PAGE)
    sample = samples["x"][:1]
    (site / "sample.json").write_text(json.dumps({"x": sample.ravel().tolist(), "dims": sample.shape}))
    with _serve(site) as (address, answers):
        answer = _open_page(address, answers, tmp_path / "profile")
    assert "error" not in answer, answer
    got = np.array(answer["y"], np.float32).reshape(answer["dims"])
    (expected,) = Session(result.model).run({"x": sample}).values()
    step = np.ptp(expected) / 255
    assert np.abs(got - expected).max() <= 1.01 * step
    assert 10 * np.log10((expected**2).sum() / ((got - expected) ** 2).sum().clip(1e-20)) > 40


def _draw(shape: tuple[int, ...], size: float = 0.2) -> np.ndarray:
    return (size * np.random.default_rng(len(shape)).standard_normal(shape)).astype(np.float32)
