"""Every motif for every target and mode, at the default effort: a file that loads, and agrees or warns."""

from __future__ import annotations

from pathlib import Path

import pytest

import onnxq
from tests.fuzz.judge import check_result
from tests.motifs.catalogue import MOTIFS
from tests.motifs.net import Motif, compose

# Without this, sizes decide, and networks as small as these stay float.
FORCED = {"rules": [{"op": "*", "set": {"quantize": True}}]}
STATIC = ("ort-int8", "trt-int8", "virtual-int8")
MODES = (*STATIC, "ort-dynamic", "ort-int8-weights")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("motif", MOTIFS, ids=lambda motif: motif.name)
def test_a_motif_between_products(motif: Motif, mode: str, tmp_path: Path) -> None:
    proto, samples = compose([motif], max(17, motif.since))
    config = onnxq.load_config(mode, FORCED)
    out = tmp_path / "out.onnx"
    result = onnxq.quantize(proto, samples, config, overrides={"latency": False, "threads": 1}, out=out)
    check_result(result, out, proto, samples, target=config.target)
    if mode in STATIC:
        # The products around the motif, at the least.
        assert len(result.plan.sites) > 3


def test_names_are_of_one_motif_each() -> None:
    assert len({motif.name for motif in MOTIFS}) == len(MOTIFS)
