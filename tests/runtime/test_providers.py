"""Execution providers: of a model and those made from it, and errors that list those there are."""

import contextlib
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import onnxq
from onnxq.errors import ConfigError
from onnxq.graph import add_libraries, get_index, infer_shapes, name_nodes, strip_weights
from onnxq.graph.light import find_provider
from onnxq.runtime import Session, check_provider
from onnxq.runtime.session import CPU, set_options
from tests.pipeline.models import images, residual


def find_other() -> str:
    """A provider beside the CPU's that starts here: onnxruntime-gpu also lists that of a TensorRT it does not bring."""
    for name in onnxruntime.get_available_providers():
        with contextlib.suppress(ConfigError):
            if name != CPU and Session(residual(), provider=name):
                return name
    return ""


# In a wheel without a GPU's, one that takes no operator of ONNX and leaves them to the CPU.
OTHER = find_other()
needs_another = pytest.mark.skipif(not OTHER, reason="this onnxruntime has one provider")
FAST = {"effort": "fast", "latency": False}


def list_providers(session: Session) -> list[str]:
    return list(session.native.get_providers())


@needs_another
def test_sessions_of_a_model_and_those_made_from_it_run_on_its_provider() -> None:
    made = strip_weights(infer_shapes(name_nodes(add_libraries(residual(), (), OTHER))))
    assert find_provider(made) == find_provider(get_index(made).model) == OTHER
    assert list_providers(Session(made))[0] == OTHER
    assert list_providers(Session(made, provider="")) == [CPU]
    assert list_providers(Session(residual())) == [CPU]


@pytest.mark.parametrize("name", ["cpu", "CPU", "CPUExecutionProvider"])
def test_the_cpu_needs_no_name(name: str) -> None:
    assert check_provider(name) == ""
    assert set_options("") == (CPU, {})


@needs_another
def test_a_provider_goes_by_its_short_name_or_its_own() -> None:
    assert check_provider(OTHER) == check_provider(OTHER.removesuffix("ExecutionProvider").lower()) == OTHER


def test_an_unknown_provider_is_an_error_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[Q312\]") as caught:
        check_provider("quantum")
    assert "cpu" in caught.value.fix
    (tmp_path / "my.yaml").write_text("target: ort\nruntime: {provider: quantum}\n")
    with pytest.raises(ConfigError, match="quantum"):
        onnxq.quantize(residual(), images(), tmp_path / "my.yaml")


@needs_another
def test_quantizing_on_another_provider_gives_the_same_ranges() -> None:
    made = [onnxq.quantize(residual(), images(), overrides={**FAST, "provider": name}) for name in ("cpu", OTHER)]
    assert [one.plan.data.endswith(f"; run on {OTHER}") for one in made] == [False, True]
    scales = [{site.site: site.qparams.scale for site in one.plan.sites} for one in made]
    assert scales[0].keys() == scales[1].keys()
    for site, scale in scales[0].items():
        np.testing.assert_allclose(scale, scales[1][site], rtol=1e-4)


@needs_another
def test_diff_runs_the_quantized_model_on_it_and_the_reference_on_the_cpu() -> None:
    quantized = onnxq.quantize(residual(), images(), overrides=FAST).model
    wanted = {"engines": "ort", "layers": True, "provider": OTHER}
    runs = {run.name: run.engine for run in onnxq.diff(residual(), quantized, images(), overrides=wanted).runs}
    assert OTHER in runs["ort-on"]
    assert OTHER not in runs["ort-off"] + runs["float"]
    profile = onnxq.profile_model(residual(), quantized, images(), overrides={"samples": 2, "provider": OTHER})
    assert profile.groups


@pytest.mark.gpu
@pytest.mark.skipif("CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="no onnxruntime-gpu")
def test_ranges_of_the_gpu_are_those_of_the_cpu() -> None:
    made = [onnxq.quantize(residual(), images(), overrides={**FAST, "provider": name}) for name in ("cpu", "cuda")]
    for one, other in zip(made[0].plan.sites, made[1].plan.sites, strict=True):
        np.testing.assert_allclose(one.qparams.scale, other.qparams.scale, rtol=1e-3)
    assert made[1].report.checks[0].sqnr_db[0] == pytest.approx(made[0].report.checks[0].sqnr_db[0], abs=0.5)
