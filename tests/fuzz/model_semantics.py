"""Models altered by `graph_edits` or `valid_edits`, given as files or as ModelProtos."""

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import onnx

import onnxq
from tests.fuzz.graph_edits import edit_model
from tests.fuzz.judge import check_annotated, check_result
from tests.fuzz.nets import NAMES, copied, feeds
from tests.fuzz.valid_edits import edit_validly


def make_case(rng: Random, folder: Path) -> str:
    """Write an altered model, and case.json that says what is to be done with it."""
    name = rng.choice(NAMES)
    proto = copied(name)
    # Most changes of the one kind end in onnx.checker; those of the other get through to the end.
    edit = rng.choice((edit_model, edit_validly))
    edits = [edit(rng, proto) for _ in range(rng.choice((1, 1, 1, 2, 3) if edit is edit_model else (1, 2, 3, 5)))]
    configs = ("ort-int8",) * 4 + ("ort-int8-percentile", "ort-int4-weights", "ort-w4a8", "trt-int8", "virtual-int8")
    case: dict[str, Any] = {
        "verb": rng.choice(("quantize",) * 8 + ("annotate", "plan")),
        "config": rng.choice(configs),
        "effort": rng.choice(("fast",) * 6 + ("balanced",)),
        "proto": rng.random() < 0.2,
        "forced": rng.random() < 0.3,
    }
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    (folder / "case.json").write_text(json.dumps(case))
    return f"{name}: {', '.join(edits)}; {case}"


def run_case(folder: Path, work: Path) -> Iterable[str]:
    """Quantize, plan or annotate the model."""
    path, out = folder / "model.onnx", work / "out.onnx"
    case = json.loads((folder / "case.json").read_text())
    proto = onnx.load(path, load_external_data=False)
    source = proto if case["proto"] else path
    if case["verb"] == "annotate":
        onnxq.annotate_bits(source, out=out)
        check_annotated(out, path)
        return ["out.onnx"]
    samples = feeds(proto)
    rules = {"rules": [{"op": "*", "set": {"quantize": True}}]} if case["forced"] else {}
    config = onnxq.load_config(case["config"], rules)
    if case["verb"] == "plan":
        onnxq.make_plan(source, samples, config, out=work / "plan.json")
        return ["plan.json"]
    before = proto.SerializeToString()
    result = onnxq.quantize(
        source, samples, config, overrides={"effort": case["effort"], "latency": False, "threads": 1}, out=out
    )
    check_result(result, out, path, samples, target=config.target)
    assert proto.SerializeToString() == before, "the caller's ModelProto was changed"
    return ["out.onnx"]
