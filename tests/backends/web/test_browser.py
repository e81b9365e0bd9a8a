"""A quantized file in a page: headless Chromium loads it with onnxruntime-web, and answers as ONNX Runtime does."""

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
from onnxq.backends.web.node import INSTALL, find_package
from onnxq.runtime import Session
from tests.engines import kit

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
