"""Test models of others through `quantize` for each target: the onnx package's node tests, and folders of models.

    python -m tests.fuzz.suites --nodes                   each operator's tests, alone and between two products
    python -m tests.fuzz.suites --nodes --every 10        a tenth of them
    python -m tests.fuzz.suites --peers                   as ONNX Runtime's, ModelOpt's and NNCF's suites have them
    python -m tests.fuzz.suites --folder models/          models/NAME/model.onnx, samples 0.npz, ... beside it

Exit status: 1 if anything failed, else 0. See docs/robustness.md.
"""

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import OrtValue

import onnxq
from tests.fuzz.case import FAILED, REFUSED, Outcome
from tests.fuzz.judge import check_result, open_original
from tests.fuzz.peers.catalogue import SUITES
from tests.fuzz.run import TRIES_A_WORKER, TRY_LIMIT, Worker

TARGETS = ("ort-int8", "trt-int8", "virtual-int8")
SAMPLES = 4
# Channels of the products around a node test.
WIDEST = 128
# A model that onnxq refuses, and that ONNX Runtime cannot run either.
UNRUNNABLE = "refused, as ONNX Runtime does"
# Arrays; lists of them for sequences, None for what is optional and missing.
Feeds = dict[str, Any]


class Subject(NamedTuple):
    """A model and its samples. group: where it is counted. forced: all that has a kernel is quantized."""

    name: str
    model: onnx.ModelProto
    samples: list[Feeds]
    group: str = ""
    forced: bool = True


def list_nodes() -> Iterator[Subject]:
    """The node tests of the onnx package, each alone and, where it has float32 data, between two products."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    for case in cases:
        values = [_to_array(value) for value in case.data_sets[0][0]]
        feeds = {entry.name: value for entry, value in zip(case.model.graph.input, values, strict=True)}
        rng = np.random.default_rng(0)
        yield Subject(case.name, case.model, [_vary(feeds, rng) for _ in range(SAMPLES)])
        between = put_between(case.model, feeds)
        if between is not None:
            samples = [_vary(feeds, rng) for _ in range(SAMPLES)]
            yield Subject(f"{case.name} between products", between, samples)


def _to_array(value: Any) -> Any:
    """The value as an array where it is a tensor. Samples with NaN and inf are refused, so that these become 1."""
    if isinstance(value, TensorProto):
        value = numpy_helper.to_array(value)
    if isinstance(value, (np.ndarray, np.generic, int, float)):
        value = np.asarray(value)
        if value.dtype.kind == "f" or value.dtype.isbuiltin == 2:
            value = np.where(np.isfinite(value.astype(np.float32)), value, value.dtype.type(1))
    return value


def _vary(feeds: Feeds, rng: np.random.Generator) -> Feeds:
    """The sample with its float32 values moved a little: one alone tells no range."""
    return {
        name: (value * (1 + 0.1 * rng.standard_normal(value.shape))).astype(np.float32)
        if getattr(value, "dtype", None) == np.float32
        else value
        for name, value in feeds.items()
    }


def put_between(model: onnx.ModelProto, feeds: Feeds) -> onnx.ModelProto | None:
    """The model with a MatMul or Conv in front of its first float32 input and one behind its first float32 output.

    None where it has no such input or output with an axis.
    """
    out = onnx.ModelProto.FromString(model.SerializeToString())
    rng = np.random.default_rng(0)
    graph = out.graph
    entry = next((v for v in graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT), None)
    leave = next((v for v in graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT), None)
    if entry is None or leave is None or 0 in feeds[entry.name].shape or not feeds[entry.name].ndim:
        return None
    shape = [dim.dim_value for dim in leave.type.tensor_type.shape.dim]
    if not shape or 0 in shape:
        return None
    before = _multiply(graph, "in", feeds[entry.name].shape, ("suite/x", entry.name), rng)
    behind = _multiply(graph, "out", shape, (leave.name, "suite/y"), rng)
    nodes = [*before, *graph.node, *behind]
    del graph.node[:]
    graph.node.extend(nodes)
    if not any(entry.domain == "" for entry in out.opset_import):
        out.opset_import.append(helper.make_opsetid("", 17))
    inner, entry.name, leave.name = entry.name, "suite/x", "suite/y"
    feeds["suite/x"] = feeds.pop(inner)
    return out


def _multiply(
    graph: onnx.GraphProto, name: str, dims: Sequence[int], ends: tuple[str, str], rng: np.random.Generator
) -> list[onnx.NodeProto]:
    """The nodes of a product from one tensor to another of the same shape; the weight goes into the graph."""
    conv = len(dims) == 4
    width = dims[1] if conv else dims[-1]
    # One test has a vector of 10,000 numbers, whose square would be a weight of 400 MB.
    columns = max(part for part in range(1, WIDEST + 1) if width % part == 0)
    weight = (np.eye(columns) + 0.1 * rng.standard_normal((columns, columns))).astype(np.float32)
    weight = weight[..., None, None] if conv else weight
    tensors = {"w": weight, "narrow": np.array([-1, columns]), "wide": np.array(dims)}
    graph.initializer.extend(
        numpy_helper.from_array(tensor, f"suite/{name}/{key}")
        for key, tensor in tensors.items()
        if key == "w" or columns < width
    )

    def make_node(kind: str, *names: str) -> onnx.NodeProto:
        return helper.make_node(kind, names[:-1], names[-1:], f"suite/{name}/{kind}/{names[-1]}")

    x, y, weight_name = f"suite/{name}/x", f"suite/{name}/y", f"suite/{name}/w"
    if conv or columns == width:
        return [make_node("Conv" if conv else "MatMul", ends[0], weight_name, ends[1])]
    return [
        make_node("Reshape", ends[0], f"suite/{name}/narrow", x),
        make_node("MatMul", x, weight_name, y),
        make_node("Reshape", y, f"suite/{name}/wide", ends[1]),
    ]


def list_folder(folder: Path) -> Iterator[Subject]:
    """The models of a folder of folders."""
    for path in sorted(folder.glob("*/model.onnx")):
        samples = [dict(np.load(file)) for file in sorted(path.parent.glob("*.npz"))]
        yield Subject(path.parent.name, onnx.load(path), samples)


def list_peers() -> Iterator[Subject]:
    """Models after other tools' suites, with as many samples as those use and with more, forced and as sizes decide."""
    for suite, peers in SUITES.items():
        for name, peer in peers.items():
            model, samples = peer.make(name)
            for count, forced in product(peer.counts, (True, False)):
                mode = "forced" if forced else "as sizes decide"
                full = f"{suite}: {name}, samples: {count}, {mode}"
                yield Subject(full, model, list[Feeds](samples[:count]), f"{suite}, {mode}, ", forced)


def runs(subject: Subject) -> bool:
    """True where ONNX Runtime can run the model on all samples, as it is or at an older opset."""
    types = {value.name: value.type.tensor_type.elem_type for value in subject.model.graph.input}
    with suppress(Exception):
        session = open_original(subject.model)
        for feeds in subject.samples:
            if any(getattr(value, "dtype", np.dtype(bool)).isbuiltin == 2 for value in feeds.values()):
                # numpy cannot tell ONNX Runtime that numbers are bfloat16, float8 or of 4 bits.
                typed = OrtValue.ortvalue_from_numpy_with_onnx_type
                session.run_with_ort_values(None, {name: typed(value, types[name]) for name, value in feeds.items()})
            else:
                session.run(None, feeds)
        return True
    return False


def write_subject(subject: Subject, folder: Path) -> None:
    """Write model and samples, these as ONNX test data, which holds values of every type."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "model.onnx").write_bytes(subject.model.SerializeToString())
    types = {value.name: value.type for value in subject.model.graph.input}
    for k, feeds in enumerate(subject.samples):
        place = folder / "samples" / f"test_data_set_{k}"
        place.mkdir(parents=True)
        for number, (name, value) in enumerate(feeds.items()):
            if types[name].HasField("optional_type"):
                proto = numpy_helper.from_optional(value, name)
            elif types[name].HasField("sequence_type"):
                proto = numpy_helper.from_list(value, name)
            else:
                proto = numpy_helper.from_array(value, name)
            (place / f"input_{number}.pb").write_bytes(proto.SerializeToString())


def run_case(folder: Path, work: Path) -> Iterable[str]:
    """Quantize the written subject as `case.json` says."""
    path, samples, out = folder / "model.onnx", folder / "samples", work / "out.onnx"
    case = json.loads((folder / "case.json").read_text())
    rules = {"rules": [{"op": "*", "set": {"quantize": True}}]} if case["forced"] else {}
    config = onnxq.load_config(case["config"], {**rules, "effort": "balanced"})
    result = onnxq.quantize(
        path, samples if any(samples.glob("*/*")) else None, config, overrides={"latency": False, "threads": 1}, out=out
    )
    check_result(result, out, onnx.load(path), _read_samples(samples), target=config.target)
    return ["out.onnx"]


def _read_samples(folder: Path) -> list[Feeds]:
    """The samples, all of tensors, since only these are accepted."""
    files = [sorted(place.iterdir()) for place in sorted(folder.iterdir())] if folder.exists() else []
    protos = [[onnx.load_tensor(file) for file in row] for row in files]
    return [{proto.name: numpy_helper.to_array(proto) for proto in row} for row in protos]


class Runner:
    """Runs subjects in a process that is started again when it dies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worker: Worker | None = None

    def run(self, subject: Subject) -> dict[str, Outcome]:
        """One subject for each target; of what is refused, whether ONNX Runtime runs it."""
        write_subject(subject, self.folder / "input")
        runnable = runs(subject)
        outcomes = {preset: self._try(preset, forced=subject.forced) for preset in TARGETS}
        for preset, outcome in outcomes.items():
            if outcome.kind == REFUSED and not runnable:
                outcomes[preset] = Outcome(UNRUNNABLE, outcome.label, outcome.place, outcome.detail, outcome.seconds)
        return outcomes

    def _try(self, preset: str, *, forced: bool) -> Outcome:
        (self.folder / "input" / "case.json").write_text(json.dumps({"config": preset, "forced": forced}))
        self.worker = self.worker or Worker("tests.fuzz.suites", self.folder, TRY_LIMIT)
        outcome = self.worker.run({})
        if self.worker.ended() or self.worker.tries >= TRIES_A_WORKER:
            self.stop()
        return outcome

    def stop(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.stop()
            self.worker = None


def main() -> int:
    """Run what the command line asks for, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.suites", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", action="store_true", help="the onnx package's node tests")
    parser.add_argument("--peers", action="store_true", help="models after those of other tools' suites")
    parser.add_argument("--folder", type=Path, help="a folder of models")
    parser.add_argument("--every", type=int, default=1, help="only each so-manieth subject")
    parser.add_argument("--start", type=int, default=0, help="number of the first subject")
    parser.add_argument("--only", default="", help="subjects whose name holds this")
    parser.add_argument("--accepted", action="store_true", help="print those that are accepted, too")
    asked = parser.parse_args()
    subjects = [
        *(list_nodes() if asked.nodes else ()),
        *(list_peers() if asked.peers else ()),
        *(list_folder(asked.folder) if asked.folder else ()),
    ]
    subjects = [subject for subject in subjects[asked.start :: asked.every] if asked.only in subject.name]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory(prefix="onnxq-suites-") as folder:
        runner = Runner(Path(folder))
        for subject in subjects:
            for preset, outcome in runner.run(subject).items():
                counts[f"{subject.group}{preset}"][outcome.kind] += 1
                if outcome.detail or asked.accepted:
                    words = " ".join(outcome.detail.split())[-400:]
                    where = f"{subject.name} [{preset}] {outcome.seconds:.1f} s {outcome.label} {outcome.place}"
                    print(f"{outcome.kind} {where}: {words}", flush=True)
        runner.stop()
    for group, row in counts.items():
        print(f"{group}: {sum(row.values())} subjects, {dict(row)}")
    return 1 if any(row[FAILED] for row in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
