"""TensorRT's plugins: a library compiled here, built into engines ahead of time, and its absence in words."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import onnxq
from onnxq.backends import find_backend, load_config
from onnxq.backends.engine import Job
from onnxq.backends.trt.engine import build_trt
from onnxq.cli import cli
from onnxq.errors import ConfigError
from onnxq.sites import TensorId
from tests.custom_ops.models import network
from tests.engines import kit

pytestmark = kit.needs_rtx
SHAPES = {"x": ((1, 3, 16, 16), (4, 3, 16, 16), (8, 3, 16, 16))}
SIZES = "x:1x3x16x16,4x3x16x16,8x3x16x16"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, library: Path) -> onnxq.Result:
    """The network for TensorRT; its custom operator is computed by ONNX Runtime's library."""
    overrides = {"target": "trt", "effort": "fast", "latency": False, "ort_library": library}
    return onnxq.quantize(network(), overrides=overrides)


def test_custom_operators_stay_float_with_a_line_and_their_tensors_get_ranges(quantized: onnxq.Result) -> None:
    left = {one.subject: one for one in quantized.plan.left_float}
    assert left["s/Swell"].code == "F108"
    assert "example.ops" in left["s/Swell"].reason
    sites = {site.site: site for site in quantized.plan.sites}
    assert sites[TensorId("r")].qparams is not None  # behind the custom operator, in front of a convolution


def test_an_engine_is_built_with_a_plugin(quantized: onnxq.Result, plugin: Path) -> None:
    proof = onnxq.prove(quantized.model, overrides={"plugin": plugin, "shapes": SIZES, "require_int8": "Conv"})
    assert proof.built, proof.build.reason
    assert proof.holds
    assert proof.by_kind()["custom_layer"] >= 1


def test_without_the_plugin_the_node_is_named(quantized: onnxq.Result) -> None:
    proof = onnxq.prove(quantized.model, overrides={"shapes": SIZES})
    assert not proof.built
    assert (proof.build.node, proof.build.needs_plugin) == ("s/Swell", True)


def test_diff_builds_with_it(quantized: onnxq.Result, plugin: Path, tmp_path: Path) -> None:
    if not find_backend("trt").local.builds_ahead:
        pytest.skip("only TensorRT for RTX builds without a GPU")
    job = Job(shapes=SHAPES, capability=(8, 6), plugins=(str(plugin),))
    assert build_trt(find_backend("trt").local, quantized.model, job, tmp_path).stat().st_size > 1000


@pytest.mark.parametrize("content", [None, b"no library at all"])
def test_a_file_that_is_no_plugin_is_an_error_in_words(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "plugin.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"plugin.*\[Q322\]") as caught:
        onnxq.prove(kit.conv(), overrides={"plugin": [path]})
    assert str(path) in caught.value.cause


def test_the_option_and_the_configuration(quantized: onnxq.Result, plugin: Path, tmp_path: Path) -> None:
    quantized.save(tmp_path / "m.onnx")
    done = CliRunner().invoke(cli, ["prove", str(tmp_path / "m.onnx"), "--plugin", str(plugin), "--forbid", "float16"])
    assert done.exit_code == 0, done.stderr
    (tmp_path / "my.yaml").write_text("runtime: {plugins: libs/a.so}\n")
    assert load_config(tmp_path / "my.yaml").runtime.plugins == (str(tmp_path / "libs" / "a.so"),)


def test_onnx_runtime_has_no_plugins(plugin: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[Q317\]"):
        onnxq.prove(kit.conv(), overrides={"engine": "ort", "plugin": plugin})
