"""Execution providers: chosen for a block, and errors that list those there are."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import onnxq
from onnxq.config import RuntimeConfig, load_config
from onnxq.errors import ConfigError
from onnxq.runtime import CPU, Session, find_provider, use_provider, use_runtime
from tests.pipeline.models import images, residual

# One that every wheel has beside the CPU's: it takes no operator of ONNX, and leaves them to the CPU.
OTHER = next((name for name in onnxruntime.get_available_providers() if name != CPU), "")
needs_another = pytest.mark.skipif(not OTHER, reason="this onnxruntime has one provider")


def list_providers(session: Session) -> list[str]:
    return list(session.native.get_providers())


@needs_another
def test_sessions_of_a_block_run_on_its_provider() -> None:
    short = OTHER.removesuffix("ExecutionProvider").lower()
    with use_runtime(RuntimeConfig(provider=short)):
        assert list_providers(Session(residual()))[0] == OTHER
        assert list_providers(Session(residual(), provider=CPU)) == [CPU]
    assert list_providers(Session(residual())) == [CPU]


@pytest.mark.parametrize("name", ["cpu", "CPU", "CPUExecutionProvider"])
def test_a_provider_goes_by_its_short_name_or_its_own(name: str) -> None:
    assert find_provider(name) == CPU


def test_an_unknown_provider_is_an_error_with_those_there_are(tmp_path) -> None:
    with pytest.raises(ConfigError) as caught, use_provider("quantum"):
        pytest.fail("the block must not begin")
    assert caught.value.code == "Q312"
    assert "cpu" in caught.value.fix
    (tmp_path / "my.yaml").write_text("target: ort\nruntime: {provider: quantum}\n")
    assert load_config(tmp_path / "my.yaml").runtime.provider == "quantum"
    with pytest.raises(ConfigError, match="quantum"):
        onnxq.quantize(residual(), images(), tmp_path / "my.yaml")


@needs_another
def test_quantizing_on_another_provider_gives_the_same_ranges() -> None:
    made = [
        onnxq.quantize(residual(), images(), effort="fast", latency=False, provider=name) for name in ("cpu", OTHER)
    ]
    assert [one.plan.data.endswith(f"; run on {OTHER}") for one in made] == [False, True]
    scales = [{site.site: site.qparams.scale for site in one.plan.sites} for one in made]
    assert scales[0].keys() == scales[1].keys()
    for site, scale in scales[0].items():
        np.testing.assert_allclose(scale, scales[1][site], rtol=1e-4)


@needs_another
def test_diff_runs_the_quantized_model_on_it_and_the_reference_on_the_cpu() -> None:
    quantized = onnxq.quantize(residual(), images(), effort="fast", latency=False).model
    found = onnxq.diff(residual(), quantized, images(), engines=["ort"], layers=True, provider=OTHER)
    runs = {run.name: run.engine for run in found.runs}
    assert OTHER in runs["ort-on"]
    assert OTHER not in runs["ort-off"] + runs["float"]
    profile = onnxq.profile_model(residual(), quantized, images(), samples=2, provider=OTHER)
    assert profile.groups


@pytest.mark.gpu
@pytest.mark.skipif("CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="no onnxruntime-gpu")
def test_ranges_of_the_gpu_are_those_of_the_cpu() -> None:
    made = [onnxq.quantize(residual(), images(), effort="fast", latency=False, provider=p) for p in ("cpu", "cuda")]
    for one, other in zip(made[0].plan.sites, made[1].plan.sites, strict=True):
        np.testing.assert_allclose(one.qparams.scale, other.qparams.scale, rtol=1e-3)
    assert made[1].report.checks[0].sqnr_db[0] == pytest.approx(made[0].report.checks[0].sqnr_db[0], abs=0.5)
