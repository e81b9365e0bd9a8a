"""Serialized models with damaged bytes, with and without external data."""

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

import onnx

import onnxq
from tests.fuzz.judge import check_annotated, check_result
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.nets import NAMES, copied, feeds, net


def make_case(rng: Random, folder: Path) -> str:
    """Write a damaged model, and case.json that says what is to be done with it."""
    name, external = rng.choice(NAMES), rng.random() < 0.25
    path = folder / "model.onnx"
    words = name
    if external:
        onnx.save(
            copied(name),
            path,
            save_as_external_data=True,
            location="model.onnx.data",
            size_threshold=rng.choice((0, 256)),
        )
        words += ", external data"
    else:
        path.write_bytes(net(name).SerializeToString())
    data = folder / "model.onnx.data"
    if external and data.exists() and rng.random() < 0.3:
        data.write_bytes(mutate_bytes(rng, data.read_bytes()))
        words += ", its data damaged"
    else:
        path.write_bytes(_damaged(rng, path.read_bytes()))
    verb = rng.choice(("quantize", "quantize", "quantize", "annotate", "plan"))
    (folder / "case.json").write_text(json.dumps({"verb": verb}))
    return f"{words}, {verb}"


def _damaged(rng: Random, data: bytes) -> bytes:
    """Mostly damage that leaves lengths as they are: protobuf refuses nearly everything else at once."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(out))
        out[at] = rng.choice(
            (out[at] ^ 1 << rng.randrange(8), (out[at] + 1) % 256, (out[at] - 1) % 256, 0, 1, 127, 255)
        )
    return bytes(out)


def run_case(folder: Path, work: Path) -> Iterable[str]:
    """Inspect the model, then quantize, plan or annotate it."""
    path, out = folder / "model.onnx", work / "out.onnx"
    verb = json.loads((folder / "case.json").read_text())["verb"]
    onnxq.inspect(path)
    if verb == "annotate":
        onnxq.annotate_bits(path, out=out)
        check_annotated(out, path)
        return ["out.onnx"]
    samples = feeds(onnx.load(path, load_external_data=False))
    if verb == "plan":
        onnxq.make_plan(path, samples, out=work / "plan.json")
        return ["plan.json"]
    result = onnxq.quantize(path, samples, overrides={"effort": "fast", "latency": False, "threads": 1}, out=out)
    check_result(result, out, path, samples)
    return ["out.onnx"]
