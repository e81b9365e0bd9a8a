"""Test models of others through `quantize` for each target: the onnx package's node tests, and folders of models.

    python -m tests.fuzz.suites --nodes                   each operator's tests, alone and between two products
    python -m tests.fuzz.suites --nodes --every 10        a tenth of them
    python -m tests.fuzz.suites --folder models/          models/NAME/model.onnx, samples 0.npz, ... beside it

Exit status: 1 if anything failed, else 0. See docs/robustness.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.fuzz.case import ACCEPTED, FAILED, Outcome
from tests.fuzz.judge import open_session
from tests.fuzz.run import TRIES_A_WORKER, TRY_LIMIT, Worker

TARGETS = ("ort-int8", "trt-int8", "virtual-int8")
SAMPLES = 4
# ONNX Runtime cannot run these as they are, so that nothing is asked of onnxq.
UNRUNNABLE = "not run by ONNX Runtime"
Feeds = dict[str, np.ndarray]
Subject = tuple[str, onnx.ModelProto, list[Feeds]]


def list_nodes() -> Iterator[Subject]:
    """The node tests of the onnx package, each alone and, where it has float32 data, between two products."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    for case in cases:
        feeds = _name_inputs(case.model, case.data_sets[0][0])
        if feeds is None:
            continue
        rng = np.random.default_rng(0)
        yield case.name, case.model, [_vary(feeds, rng) for _ in range(SAMPLES)]
        between = put_between(case.model, feeds)
        if between is not None:
            yield f"{case.name} between products", between, [_vary(feeds, rng) for _ in range(SAMPLES)]


def _name_inputs(model: onnx.ModelProto, values: list[object]) -> Feeds | None:
    """The values by their inputs; None where one has no numbers, such as a sequence."""
    values = [numpy_helper.to_array(one) if isinstance(one, TensorProto) else one for one in values]
    feeds = {value.name: np.asarray(one) for value, one in zip(model.graph.input, values, strict=False)}
    # Neither do strings and float8 go through a file of numpy's.
    return feeds if all(value.dtype.kind in "fiub" for value in feeds.values()) else None


def _vary(feeds: Feeds, rng: np.random.Generator) -> Feeds:
    """The sample with its float32 values moved a little: one alone tells no range."""
    return {
        name: (value * (1 + 0.1 * rng.standard_normal(value.shape))).astype(np.float32)
        if value.dtype == np.float32
        else value
        for name, value in feeds.items()
    }


def put_between(model: onnx.ModelProto, feeds: Feeds) -> onnx.ModelProto | None:
    """The model with a MatMul or Conv in front of its first float32 input and one behind its first float32 output.

    None where it has no such input or output with an axis.
    """
    out = onnx.ModelProto()
    out.CopyFrom(model)
    rng = np.random.default_rng(0)
    graph = out.graph
    entry = next((v for v in graph.input if getattr(feeds.get(v.name), "dtype", None) == np.float32), None)
    leave = next((v for v in graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT), None)
    if entry is None or leave is None or 0 in feeds[entry.name].shape or not feeds[entry.name].ndim:
        return None
    shape = [dim.dim_value for dim in leave.type.tensor_type.shape.dim]
    if not shape or 0 in shape:
        return None
    weights = []
    for name, dims, ends in (
        ("in", feeds[entry.name].shape, ("suite/x", entry.name)),
        ("out", shape, (leave.name, "suite/y")),
    ):
        conv = len(dims) == 4
        width = dims[1] if conv else dims[-1]
        weight = (np.eye(width) + 0.1 * rng.standard_normal((width, width))).astype(np.float32)
        weights.append(numpy_helper.from_array(weight[..., None, None] if conv else weight, f"suite/{name}/w"))
        node = helper.make_node("Conv" if conv else "MatMul", [ends[0], weights[-1].name], [ends[1]], f"suite/{name}")
        graph.node.insert(0 if name == "in" else len(graph.node), node)
    graph.initializer.extend(weights)
    entry.name, leave.name = "suite/x", "suite/y"
    feeds["suite/x"] = feeds.pop(graph.node[0].output[0])
    return out


def list_folder(folder: Path) -> Iterator[Subject]:
    """The models of a folder of folders."""
    for path in sorted(folder.glob("*/model.onnx")):
        yield path.parent.name, onnx.load(path), [dict(np.load(file)) for file in sorted(path.parent.glob("*.npz"))]


class Runner:
    """Runs subjects in a process that is started again when it dies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worker: Worker | None = None

    def run(self, model: onnx.ModelProto, samples: list[Feeds], preset: str) -> Outcome:
        """One subject for one target, all that has a kernel quantized."""
        given = self.folder / "input"
        shutil.rmtree(given, ignore_errors=True)
        given.mkdir()
        (given / "model.onnx").write_bytes(model.SerializeToString())
        (given / "case.json").write_text(json.dumps({"config": preset, "effort": "balanced", "forced": True}))
        for k, feeds in enumerate(samples):
            np.savez(given / f"{k}.npz", **feeds)
        self.worker = self.worker or Worker("motifs", self.folder, TRY_LIMIT)
        outcome = self.worker.run({})
        if self.worker.ended() or self.worker.tries >= TRIES_A_WORKER:
            self.stop()
        return outcome

    def stop(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.stop()
            self.worker = None


def _runs(model: onnx.ModelProto, samples: list[Feeds]) -> bool:
    with suppress(Exception):
        session = open_session(model, optimize=False)
        return all(session.run(None, feeds) is not None for feeds in samples)
    return False


def main() -> int:
    """Run what the command line asks for, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.suites", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", action="store_true", help="the onnx package's node tests")
    parser.add_argument("--folder", type=Path, help="a folder of models")
    parser.add_argument("--every", type=int, default=1, help="only each so-manieth subject")
    parser.add_argument("--start", type=int, default=0, help="number of the first subject")
    parser.add_argument("--only", default="", help="subjects whose name holds this")
    asked = parser.parse_args()
    subjects = [*(list_nodes() if asked.nodes else ()), *(list_folder(asked.folder) if asked.folder else ())]
    subjects = [one for one in subjects[asked.start :: asked.every] if asked.only in one[0]]
    counts: dict[str, Counter[str]] = {preset: Counter() for preset in TARGETS}
    with tempfile.TemporaryDirectory(prefix="onnxq-suites-") as folder:
        runner = Runner(Path(folder))
        for name, model, samples in subjects:
            runs = _runs(model, samples)
            for preset in TARGETS:
                outcome = runner.run(model, samples, preset)
                # A traceback of ours counts whatever ONNX Runtime says.
                ours = outcome.kind == FAILED and outcome.place.startswith("onnxq/")
                kind = outcome.kind if runs or ours else UNRUNNABLE
                counts[preset][kind] += 1
                if kind not in (ACCEPTED, UNRUNNABLE):
                    words = " ".join(outcome.detail.split())
                    print(f"{kind} {name} [{preset}] {outcome.label} {outcome.place}: {words[-400:]}", flush=True)
        runner.stop()
    for preset, row in counts.items():
        print(f"{preset}: {sum(row.values())} subjects, {dict(row)}")
    return 1 if any(row[FAILED] for row in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
