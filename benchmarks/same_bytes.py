#!/usr/bin/env python3
"""Record the bytes of quantized files, or compare them with a record: a refactoring must not change any.

    python benchmarks/same_bytes.py record before.json                       small networks of the tests
    python benchmarks/same_bytes.py record before.json --corpus DIR          and each model of a corpus
    python benchmarks/same_bytes.py compare before.json                      the same runs with the code as it is now

Each network goes through each preset at the default effort, with fixed samples, one thread and no latency. The hash is
of the ModelProto without metadata. Exit status of `compare`: 1 where a hash differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxq
from onnxq.errors import OnnxqError

ROOT = Path(__file__).resolve().parent.parent
# Presets, with overrides that reach the code of other modes and passes.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ort-int8": ("ort-int8", {}),
    "ort-int8 forced": ("ort-int8", {"rules": [{"op": "*", "set": {"quantize": True}}]}),
    "ort-int8 auto": ("ort-int8", {"mode": "auto"}),
    "ort-int8 min-sqnr": ("ort-int8", {"accuracy": {"min_sqnr": 40}}),
    "ort-int8 fast": ("ort-int8", {"effort": "fast"}),
    "ort-int8-mse": ("ort-int8-mse", {}),
    "ort-int8-percentile": ("ort-int8-percentile", {}),
    "ort-int8-weights": ("ort-int8-weights", {}),
    "ort-int4-weights": ("ort-int4-weights", {}),
    "ort-w4a8": ("ort-w4a8", {}),
    "ort-dynamic": ("ort-dynamic", {}),
    "ort-uint16-activations": ("ort-uint16-activations", {}),
    "trt-int8": ("trt-int8", {}),
    "trt-fp16": ("trt-fp16", {}),
    "trt-fp8": ("trt-fp8", {}),
    "trt-int4-weights": ("trt-int4-weights", {}),
    "virtual-int8": ("virtual-int8", {}),
}
SAMPLES = 24


def list_networks(corpus: Path | None) -> Iterator[tuple[str, onnx.ModelProto | Path, Any]]:
    """Name, model and samples of each network."""
    sys.path.insert(0, str(ROOT))
    from tests.fuzz import nets
    from tests.motifs.catalogue import MOTIFS
    from tests.motifs.net import compose
    from tests.pipeline.models import images, residual

    yield "residual", residual(), images(SAMPLES)
    for name in ("conv", "attention", "branches"):
        yield (
            name,
            nets.net(name),
            [
                feeds
                for seed in range(SAMPLES // nets.SAMPLES)
                for feeds in nets.feeds(nets.net(name), seed)
            ],
        )
    for motif in MOTIFS[::9]:
        model, samples = compose([motif], motif.until)
        yield f"motif {motif.name}", model, samples
    for model in sorted((corpus / "models").glob("*.onnx")) if corpus else ():
        with np.load(corpus / "data" / f"{model.stem}.npz") as stored:
            arrays = {
                key.removeprefix("calib/"): stored[key][:SAMPLES]
                for key in stored
                if key.startswith("calib/")
            }
        names = {value.name for value in onnx.load(model, load_external_data=False).graph.input}
        yield model.stem, model, {name: array for name, array in arrays.items() if name in names}


def hash_result(
    model: onnx.ModelProto | Path, samples: Any, preset: str, overrides: dict[str, Any]
) -> str:
    """SHA-256 of the result without metadata; the code of the error where it is refused."""
    fixed = {"latency": False, "threads": 1, "run_threads": 1}
    try:
        config = onnxq.load_config(preset, overrides)
        proto = onnxq.quantize(model, samples, config, overrides=fixed).model
    except OnnxqError as error:
        return f"refused: {error.code}"
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.value_info):
        if hasattr(part, "metadata_props"):
            del part.metadata_props[:]
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("record", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--only", default="", help="networks whose name holds this")
    parser.add_argument("--run", default="", help="runs whose name holds this")
    args = parser.parse_args()
    # Without PYTHONPATH it may be another checkout's.
    print(f"onnxq of {Path(onnxq.__file__).parent}", flush=True)
    before = json.loads(args.record.read_text(encoding="utf-8")) if args.action == "compare" else {}
    hashes, different = {}, 0
    for name, model, samples in list_networks(args.corpus):
        for run, (preset, overrides) in RUNS.items():
            key = f"{name} / {run}"
            if args.only not in name or args.run not in run or (before and key not in before):
                continue
            hashes[key] = hash_result(model, samples, preset, overrides)
            if before and hashes[key] != before[key]:
                different += 1
                print(f"{key}: {before[key]} -> {hashes[key]}", flush=True)
    if args.action == "record":
        args.record.write_text(json.dumps(hashes, indent=1), encoding="utf-8")
    print(f"{len(hashes)} files, {different} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
