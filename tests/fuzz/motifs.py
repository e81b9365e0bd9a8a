"""Valid networks, composed of motifs at random: what comes out of them must be right."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import onnx

import onnxq
from tests.fuzz.judge import check_engines, check_result
from tests.motifs.catalogue import MOTIFS
from tests.motifs.net import NEWEST, OLDEST, compose
from tests.networks import open_session

_PRESETS = ("ort-int8", "trt-int8", "virtual-int8") * 3 + (
    "ort-dynamic", "ort-int8-weights", "ort-int4-weights", "ort-int8-percentile", "ort-w4a8", "trt-fp16", "trt-fp8",
)  # fmt: skip
# All, and those once more that exporters write.
_OPSETS = (*range(OLDEST, NEWEST + 1), 11, 13, 17, 17, 18, 18, 20)
# Compositions that ONNX Runtime cannot run as they are say nothing of onnxq.
_ATTEMPTS = 20


def make_case(rng: Random, folder: Path, presets: Sequence[str] = _PRESETS) -> str:
    """Write a network of one to five motifs that ONNX Runtime runs, its samples, and what is to be done with it."""
    for _ in range(_ATTEMPTS):
        opset = rng.choice(_OPSETS)
        usable = [motif for motif in MOTIFS if motif.since <= opset <= min(motif.until, motif.runs)]
        motifs = [rng.choice(usable) for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5)))]
        names = ", ".join(motif.name for motif in motifs)
        try:
            proto, samples = compose(motifs, opset, rng.randrange(2**32))
            session = open_session(proto, optimize=False)
            results = [session.run(None, feeds) for feeds in samples]
        except Exception:
            continue
        if all(_is_calm(value) for run in results for value in run):
            break
    else:
        raise AssertionError("no composition runs")
    case = {
        "config": rng.choice(presets), "effort": rng.choice(("balanced", "balanced", "fast")),
        "forced": rng.random() < 0.7, "count": rng.choice((len(samples), len(samples), 2, 1)),
    }  # fmt: skip
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    (folder / "case.json").write_text(json.dumps(case))
    for k, feeds in enumerate(samples[: case["count"]]):
        np.savez(folder / f"{k}.npz", **feeds)
    return f"opset {opset}: {names}; {case}"


def _is_calm(value: object) -> bool:
    """True for values whose roundings decide nothing."""
    numbers = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return not numbers or bool(np.isfinite(value).all() and np.abs(value).max(initial=0) < 1e6)


def run_case(folder: Path, work: Path) -> Iterable[str]:
    """Quantize the network."""
    path, out = folder / "model.onnx", work / "out.onnx"
    case = json.loads((folder / "case.json").read_text())
    samples = [dict(np.load(file)) for file in sorted(folder.glob("*.npz"))]
    changes = {"rules": [{"op": "*", "set": {"quantize": True}}]} if case["forced"] else {}
    config = onnxq.load_config(case["config"], {**changes, "effort": case["effort"]})
    result = onnxq.quantize(path, samples, config, overrides={"latency": False, "threads": 1}, out=out)
    check_result(result, out, onnx.load(path), samples, target=config.target)
    if not case["forced"]:
        check_engines(result)
    return ["out.onnx"]
