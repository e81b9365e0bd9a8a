"""TensorRT itself, on a machine with a GPU: the same questions, answered by its engine inspector."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import onnxq
from tests.engines import kit

pytestmark = [pytest.mark.gpu, pytest.mark.trt, pytest.mark.skipif(find_spec("tensorrt") is None, reason="no tensorrt")]


def test_a_convolution_between_pairs_runs_in_int8():
    proof = onnxq.prove(kit.conv(), overrides={"engine": "tensorrt", "require_int8": ["Conv"]})
    assert proof.built, proof.build.reason
    assert proof.holds
    assert {one.state for one in proof.sites} == {"fused"}


def test_without_pairs_nothing_does():
    proof = onnxq.prove(kit.attention(False), overrides={"engine": "tensorrt"})
    assert proof.built, proof.build.reason
    assert all(one.type in ("float32", "float16") for one in proof.nodes)


def test_a_residual_block():
    proof = onnxq.prove(kit.residual(), overrides={"engine": "tensorrt", "require_int8": ["Conv"]})
    assert proof.holds, proof.build.reason


def test_the_timing_cache_is_kept_and_used_again(tmp_path):
    for _ in range(2):
        proof = onnxq.prove(kit.conv(), overrides={"engine": "tensorrt"}, out=tmp_path, force=True)
        assert proof.built, proof.build.reason
        assert (tmp_path / "timing.cache").stat().st_size > 0
        assert Path(tmp_path / "layers.txt").read_text().lstrip().startswith("{")


def test_what_the_parser_refuses_is_a_proof():
    assert not onnxq.prove(kit.conv(zero=kit.np.int8(3)), overrides={"engine": "tensorrt"}).built
