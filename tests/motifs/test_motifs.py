"""Every motif for every target and mode: a file that loads, and agrees or warns.

Each mode meets a motif at another opset, from its oldest to its newest. Modes share the passes of the default effort,
which takes four times as long as `fast`: each motif meets them in one static mode and in one of the others, and
a third or a half of the motifs does so in each mode.
"""

from pathlib import Path

import pytest

import onnxq
from onnxq.runtime import KernelError
from tests.fuzz.judge import check_result
from tests.motifs.catalogue import MOTIFS
from tests.motifs.net import NEWEST, Motif, compose

# Without this, sizes decide, and networks as small as these stay float.
FORCED = {"rules": [{"op": "*", "set": {"quantize": True}}]}
STATIC = ("ort-int8", "trt-int8", "virtual-int8")
OTHERS = ("ort-dynamic", "ort-int8-weights")
MODES = (*STATIC, *OTHERS)
_GOLDEN = 0.618
# Beside its turn: no other motif has float types that do not hold however many nodes stay in float32.
BESIDE = {("mask_of_booleans", "trt-int8")}


def choose_opset(motif: Motif, mode: str) -> int:
    """One of each fifth of the motif's opsets, in another order for every motif."""
    number = MOTIFS.index(motif)
    place = (MODES.index(mode) + number) % len(MODES) + number * _GOLDEN % 1
    return motif.since + int(place / len(MODES) * (min(motif.until, NEWEST) + 1 - motif.since))


def choose_effort(motif: Motif, mode: str) -> str:
    """The default effort for one of the static modes and for one of the others, `fast` for the rest."""
    number = MOTIFS.index(motif)
    turns = {(motif.name, modes[number % len(modes)]) for modes in (STATIC, OTHERS)}
    return "balanced" if (motif.name, mode) in turns | BESIDE else "fast"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("motif", [
    # ONNX Runtime 1.24 does not load quantized branches that it inlines ("HasExternalDataInMemory").
    pytest.param(motif, marks=pytest.mark.recent_ort if motif.name == "branch_by_shape" else (), id=motif.name)
    for motif in MOTIFS if motif.since <= NEWEST
])  # fmt: skip
def test_a_motif_between_products(motif: Motif, mode: str, tmp_path: Path) -> None:
    opset = choose_opset(motif, mode)
    proto, samples = compose([motif], opset)
    reference = compose([motif], opset, runnable=True)[0]
    config = onnxq.load_config(mode, {**FORCED, "effort": choose_effort(motif, mode)})
    out = tmp_path / "out.onnx"
    # One thread: starting more takes a tenth of the time of networks as small as these.
    overrides = {"latency": False, "threads": 1, "run_threads": 1}
    result = onnxq.quantize(proto, samples, config, overrides=overrides, out=out)
    check_result(result, out, reference, samples, target=config.target)
    if mode in STATIC:
        # The products around the motif, at the least.
        assert len(result.plan.sites) > 3


@pytest.mark.recent_ort
@pytest.mark.parametrize(("name", "opset", "op"), [
    ("gated_by_swish", 25, "Swish"), ("roi_align", 22, "RoiAlign"), ("global_pools", 22, "GlobalLpPool"),
])  # fmt: skip
def test_newer_opsets_than_onnx_runtime_has_kernels_of_are_refused(name: str, opset: int, op: str) -> None:
    (motif,) = [motif for motif in MOTIFS if motif.name == name]
    assert motif.until < opset
    proto, samples = compose([motif], opset)
    with pytest.raises(KernelError, match=rf"\({op}\)") as caught:
        onnxq.quantize(proto, samples, onnxq.load_config("ort-int8", FORCED))
    assert "with another opset" in caught.value.fix


def test_names_are_of_one_motif_each() -> None:
    assert len({motif.name for motif in MOTIFS}) == len(MOTIFS)
