"""Every other file that is read: calibration caches, markers, notes in models, proofs, results, compiled kernels."""

import json
import struct
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx

import onnxq
from onnxq.backends.engine import BuildState, Kernel
from onnxq.backends.trt.kernels import read_layers_message
from onnxq.commands.results import write_json
from onnxq.engines.diff.results import load_results
from onnxq.engines.prove.proof import Build, NodeProof, Proof, SiteProof, SiteState, find_changes, read_proof
from onnxq.interop.tensorrt import ORIGIN
from onnxq.kernels import cache as kernel_cache
from onnxq.spec import PerChannel, QuantSpec
from tests.fuzz.case import Wrong
from tests.fuzz.graph_edits import edit_model
from tests.fuzz.judge import check_file, check_plan
from tests.fuzz.mutate import mutate_bytes, mutate_text, mutate_tree
from tests.fuzz.nets import copied, feeds, net
from tests.interop.marked import Net
from tests.interop.models import write_cache
from tests.networks import open_session

_LAYERS = """Layers:
Name: node_0 + node_2, LayerType: CaskConvolution, Inputs: [ { Name: x, Dimensions: [1,3,8,8], Datatype: Int8 }], \
Outputs: [ { Name: r, Dimensions: [1,8,8,8], Datatype: Int8, Format: NHWC }], TacticName: sm86_int8, StreamId: 0, \
Metadata: [ONNX Layer: node_0]\x1e[ONNX Layer: node_2]
Name: Reformat, LayerType: Reformat, Inputs: [ { Name: r, Dimensions: [1,8,8,8], Datatype: Float }], \
Outputs: [ { Name: s, Dimensions: [1,8,8,8], Datatype: Half }], StreamId: 0, Metadata:
"""


def _damaged(rng: Random, text: str, *, tree: bool) -> bytes:
    kind = rng.randrange(3)
    if tree and kind:
        return json.dumps(mutate_tree(rng, json.loads(text))).encode("utf-8", "surrogatepass")
    if kind == 1:
        return mutate_bytes(rng, text.encode())
    return mutate_text(rng, text).encode("utf-8", "surrogatepass")


@cache
def _cache_text() -> str:
    """What TensorRT would have written for the convolutional network."""
    tapped = copied("conv")
    names = [name for node in tapped.graph.node for name in node.output if name != "y"]
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_session(tapped, optimize=False)
    greatest = {"x": 0.0, "y": 0.0} | dict.fromkeys(names, 0.0)
    for given in feeds(net("conv")):
        values = dict(zip([one.name for one in session.get_outputs()], session.run(None, given), strict=True)) | given
        greatest = {name: max(top, float(np.abs(values[name]).max())) for name, top in greatest.items()}
    return write_cache({name: np.float32(top / 127) for name, top in greatest.items()})


def _write_cache(rng: Random, folder: Path) -> None:
    (folder / "model.onnx").write_bytes(net("conv").SerializeToString())
    lines = _cache_text().splitlines()
    if rng.random() < 0.5:
        at = rng.randrange(len(lines))
        value = rng.choice((0.0, -1.0, 1e-45, 1e-38, 3e38, float("inf"), float("nan"), 1e-12, 1.0))
        name = rng.choice(("x", "", "x:y", "(Unnamed Layer* 1) [Constant]_output", "é", lines[at].rpartition(":")[0]))
        lines[at] = f"{name}: {struct.pack('>f', value).hex()}"
        data = "\n".join(lines).encode()
    else:
        data = _damaged(rng, _cache_text(), tree=False)
    (folder / "cache.txt").write_bytes(data)


def _run_cache(folder: Path, work: Path) -> Iterable[str]:
    path, out = folder / "model.onnx", work / "out.onnx"
    given = feeds(net("conv")) if (folder / "cache.txt").stat().st_size % 2 else None
    found = onnxq.import_calibration(folder / "cache.txt", path, given, overrides={"allow_missing": given is None})
    check_plan(found.plan)
    lines = (folder / "cache.txt").read_text(encoding="utf-8-sig").splitlines()
    said = {line.rpartition(":")[0].strip(): line.rpartition(":")[2].strip() for line in lines if ":" in line}
    for site in found.plan.sites:
        name = getattr(site.site, "name", "")
        taken = site.qparams is not None and site.qparams.origin == ORIGIN
        if taken and name in said and int(np.float32(site.qparams.scale).view(np.uint32)) != int(said[name], 16):
            raise Wrong(f"the scale of a tensor is not the cache's: {name}")
    onnxq.apply(path, found.plan, given, overrides={"latency": False}, out=out)
    check_file(out, optimize=False)
    return ["out.onnx"]


def _marked() -> onnx.ModelProto:
    made = Net(3)
    x = made.mark(made.input("x", "N", 8), "in", scale=0.25)
    spec = QuantSpec(bits=8, granularity=PerChannel(1))
    w = made.mark(made.weight("w", 8, 4), "fc.weight", spec, made.channels(4), role="weight")
    return made.model(made.op("Relu", made.op("MatMul", x, w), out="y"))


def _write_markers(rng: Random, folder: Path) -> None:
    proto = _marked()
    if rng.random() < 0.7:
        node = rng.choice([one for one in proto.graph.node if one.op_type == "FakeQuantize"])
        attr = rng.choice(list(node.attribute))
        value = rng.choice(
            (0, -1, 1, 3, 255, -128, 2**31, 2**63 - 1, "", "weight", "int4", "symmetric", "é", 0.5, [1], b"\xff")
        )
        attr.CopyFrom(onnx.helper.make_attribute(attr.name, value))
    else:
        edit_model(rng, proto)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


def _run_markers(folder: Path, work: Path) -> Iterable[str]:
    found = onnxq.strip_markers(folder / "model.onnx")
    check_plan(found.plan)
    onnxq.apply(found.model, found.plan, overrides={"latency": False}, out=work / "out.onnx")
    if _runs(found.model):  # without samples `apply` runs neither
        check_file(work / "out.onnx", source=found.model)
    return ["out.onnx"]


def _runs(model: onnx.ModelProto) -> bool:
    try:
        open_session(model, optimize=False)
    except Exception:
        return False
    return True


def _write_notes(rng: Random, folder: Path) -> None:
    proto = copied("pairs")
    places = [entry for holder in (proto, *proto.graph.node) for entry in holder.metadata_props]
    entry = rng.choice(places[: len(proto.metadata_props)] if rng.random() < 0.7 else places)
    tree = entry.value.startswith(("{", "["))
    entry.value = _damaged(rng, entry.value, tree=tree).decode("utf-8", "replace")
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


def _run_notes(folder: Path, work: Path) -> Iterable[str]:
    path, out = folder / "model.onnx", work / "out.onnx"
    onnxq.inspect(path)
    onnxq.annotate_bits(path, out=out)
    check_file(out)
    if path.stat().st_size % 4 == 0:
        onnxq.diff(net("conv"), path, feeds(net("conv")), overrides={"engines": ["ort"]})
    return ["out.onnx"]


def _proof() -> Proof:
    return Proof(
        source="model.onnx",
        build=Build(engine="ort", version="1.31", state=BuildState.BUILT, shapes={"x": ((1, 3, 8, 8),)}),
        kernels=(Kernel(name="k", kind="QLinearConv", nodes=("node_0",)),),
        nodes=(NodeProof(node="node_0", op="Conv", type="int8", kernel="k"),),
        sites=(SiteProof(site="x", role="activation", state=SiteState.FUSED),),
    )


def _write_proof(rng: Random, folder: Path) -> None:
    (folder / "proof.json").write_bytes(_damaged(rng, write_json(_proof()), tree=True))


def _run_proof(folder: Path, work: Path) -> Iterable[str]:
    for change in find_changes(read_proof(folder / "proof.json"), _proof()):
        str(change)
    return []


@cache
def _results() -> str:
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"engines": ["ort"], "keep": 1}
        onnxq.diff(net("conv"), net("pairs"), feeds(net("conv")), overrides=overrides, out=Path(folder) / "saved")
        return (Path(folder) / "saved" / "results.json").read_text(encoding="utf-8")


def _write_results(rng: Random, folder: Path) -> None:
    (folder / "results.json").write_bytes(_damaged(rng, _results(), tree=True))


def _run_results(folder: Path, work: Path) -> Iterable[str]:
    load_results(folder / "results.json")
    onnxq.diff(
        net("conv"), net("pairs"), feeds(net("conv")), overrides={"engines": ["ort"], "load": [folder / "results.json"]}
    )
    return []


def _write_kernel(rng: Random, folder: Path) -> None:
    place = folder / "kernels"
    place.mkdir()
    entry = kernel_cache.fetch_entry(place, "lib{}.so", {"kind": "test"}, lambda path: path.write_text("code") and None)
    note = entry.path.with_name(f"{entry.path.name}.json")
    chosen = rng.choice((note, note, entry.path))
    chosen.write_bytes(_damaged(rng, chosen.read_text(), tree=chosen is note))


def _run_kernel(folder: Path, work: Path) -> Iterable[str]:
    place = folder / "kernels"
    kernel_cache.find_entry(place, lambda key: key.get("kind") == "test")
    entry = kernel_cache.fetch_entry(place, "lib{}.so", {"kind": "test"}, lambda path: path.write_text("code") and None)
    if entry.path.read_text() != "code":
        raise Wrong("the kernel cache gave another file than was built")
    return []


def _write_layers(rng: Random, folder: Path) -> None:
    (folder / "layers.txt").write_bytes(_damaged(rng, _LAYERS, tree=False))


def _run_layers(folder: Path, work: Path) -> Iterable[str]:
    read_layers_message((folder / "layers.txt").read_bytes().decode("utf-8", "replace"))
    return []


_KINDS: dict[str, tuple[Callable[[Random, Path], Any], Callable[[Path, Path], Iterable[str]]]] = {
    "cache": (_write_cache, _run_cache),
    "markers": (_write_markers, _run_markers),
    "notes": (_write_notes, _run_notes),
    "proof": (_write_proof, _run_proof),
    "results": (_write_results, _run_results),
    "kernel": (_write_kernel, _run_kernel),
    "layers": (_write_layers, _run_layers),
}


def make_case(rng: Random, folder: Path) -> str:
    """Write one damaged file, and case.json that says of which kind it is."""
    kind = rng.choice(list(_KINDS))
    _KINDS[kind][0](rng, folder)
    (folder / "case.json").write_text(json.dumps({"kind": kind}))
    return kind


def run_case(folder: Path, work: Path) -> Iterable[str]:
    """Read the file and do with it what one does with such files."""
    return _KINDS[json.loads((folder / "case.json").read_text())["kind"]][1](folder, work)
