"""Runs that provoke the codes which no test of another room asserts, by areas."""

import importlib
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxq
from onnxq import compat, errors, import_calibration
from onnxq.backends import find_engine, load_config
from onnxq.backends.engine import TimedModel, Timing
from onnxq.calibrate.parts import join_parts
from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.evaluation.compare import check_interface
from onnxq.evaluation.metric import load_metric, parse_drop
from onnxq.graph import GraphIndex, ValueInfo, light, load_model, name_nodes
from onnxq.interop import strip_markers
from onnxq.interop.tensorrt import parse_cache
from onnxq.kernels.device import find_nvcc
from onnxq.kernels.host import build_host
from onnxq.numerics import qparams_from_range
from onnxq.observers import create_observer
from onnxq.pipeline.finalize import warn_unmeasured_cpu
from onnxq.report.model import EngineCheck, LatencyRatio, OutputCheck, Report
from onnxq.runtime import Session
from onnxq.runtime.session import check_loaded
from onnxq.sites import Refusal
from onnxq.spec import ObserverSpec, QuantSpec
from onnxq.workers import WorkPiece, dask
from onnxq.workers.processes import ProcessWorkers
from tests.codes.kit import EVERYTHING, FORCE, F, Provoke, X, fail, gemm, model, quantized, reach, rows, saved, written
from tests.custom_ops.models import network as swell
from tests.data.text.kit import make_decoder
from tests.interop.models import network
from tests.planner.test_balance import net
from tests.workers.work import die

RELU = "g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }"


def make_raiser(kind: type[errors.OnnxqError]):
    """A person's own code raises an error of this class without a code."""

    def provoke(_: Path):
        def samples():
            raise kind("mine", "is odd")
            yield

        load_data(samples(), [X])

    return provoke


for _kind in errors.OnnxqError.__subclasses__():
    if _kind.__module__ == errors.__name__:
        reach(_kind.default_code)(make_raiser(_kind))
reach("Q000")(make_raiser(errors.OnnxqError))


@reach("Q115")
def a_foreign_engine_fails(_: Path):
    pytest.importorskip("polygraphy")
    from onnxq.backends.trt.engine import load_polygraphy, translate_errors

    with translate_errors():
        load_polygraphy("logger").G_LOGGER.critical("the engine broke")


@reach("Q202")
def unreadable_data(folder: Path):
    (folder / "test_data_set_0" / "input_0.pb").mkdir(parents=True)
    load_data(folder, [X])


@reach("Q215", pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here"))
def full_disk(folder: Path):
    from onnxq.data import sources
    from onnxq.files import ScratchFolder

    store = sources._Store()
    store.folder, store._used = ScratchFolder(), 1 << 60
    os.symlink("/dev/full", store.folder.path / "0.npy")
    store.store_array(np.zeros((1 << 16,), F))


def load_texts(folder: Path, tokens: int = 256, text: bytes = b"some text of some words", **asked: object) -> None:
    """Load a text for a decoder."""
    named = name_nodes(make_decoder(caches=False, tokens=tokens))
    (folder / "a.txt").write_bytes(text)
    load_data(folder / "a.txt", GraphIndex(named).inputs, DataConfig(**asked), named)


def read_config(folder: Path, text: str) -> None:
    load_config(written(folder, text, "my.yaml"))


@reach("Q321")
def not_for_a_cache(folder: Path):
    cache = written(folder, "TRT-8601-EntropyCalibration2\nx: 3c010a14\n", "c.cache")
    import_calibration(cache, gemm(), config="trt-int4-weights")


@reach("Q406")
def no_kernel(_: Path):
    plan = quantized(config=load_config("trt-int8", {"rules": [FORCE]})).plan
    onnxq.apply(gemm(64, 64), replace(plan, sites=tuple(
        replace(site, spec=replace(site.spec, symmetric=False)) if site.role.value == "activation" else site
        for site in plan.sites
    )))  # fmt: skip


@reach("W123")
def quantize_unrunnable(_: Path):
    proto = swell()
    # Nothing in front of it can be run.
    proto.graph.node[0].input[0] = "v"
    proto.graph.node.insert(0, helper.make_node("Swell", ["x"], ["v"], domain="example.ops"))
    return onnxq.quantize(proto, config="ort-int8-weights").report.warnings


def import_anew(module: str) -> list[Any]:
    """Warnings of a module when it is imported."""
    sys.modules.pop(module, None)
    with pytest.warns(compat.CompatWarning) as caught:
        importlib.import_module(module)
    return [warning.message for warning in caught]


# ---- Files, engines, figures and conversions.

HEADER = "TRT-8601-EntropyCalibration2\n"


@reach("Q705")
def not_built(folder: Path):
    proto = gemm()
    proto.graph.node[0].domain = "com.nobody"
    proto.opset_import.append(helper.make_opsetid("com.nobody", 1))
    return fail("prove", saved(folder, proto), "--engine", "ort")


@reach("Q710")
def no_engine_to_time(folder: Path):
    models = {"m": TimedModel(gemm(), written(folder, "no engine", "engine"), {})}
    find_engine("tensorrt-rtx").time_models(models, Timing(seconds=0.1))


@reach("W127")
def unfitting_inputs(folder: Path):
    # Rows of any number, of which the Reshape takes only some.
    body = "g (float[N,4] x) => (float[A,B] y) { m = MatMul(x, w) y = Reshape(m, shape) }"
    shape, weight = np.array([7, -1]), np.random.default_rng(0).standard_normal((4, 5000)).astype(F)
    path = saved(folder, model(body, w=weight, shape=shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(light, "LARGE_BYTES", 1)
        return onnxq.quantize(path, config="ort-int8-weights").report.warnings


@reach("W137")
def rows_picked_in_iterations(_: Path):
    # The number of rows grows with the iterations.
    body = """g (float[4,8] x) => (float[A,B] y) {
        f = MatMul(x, w) all, y = Loop (two, yes, f) <body = grow (int64 i, bool go, float[N,8] seen)
            => (bool on, float[M,8] more, float[8] row) {
            on = Identity(go) more = Concat <axis = 0> (seen, f) label = ArgMax <axis = 1, keepdims = 0> (more)
            taken = Gather(w, label) row = ReduceSum <keepdims = 0> (taken, zero)
        }>
    }"""
    proto = model(body, w=np.eye(8, dtype=F), two=np.array(2), yes=np.array(True), zero=np.array([0]))
    return onnxq.quantize(proto, rows(16, 8), overrides={"latency": False}).report.warnings


def convert_integers(op: str) -> Any:
    """A file with an operator of ONNX Runtime on integers between pairs, or beside them, as a float network."""
    arrays = {"s": F(0.1), "z": np.uint8(9), "p": np.ones((8, 1, 16), np.uint8), "ps": np.ones((8, 1), F)}
    pair = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
    proto = model(f"g (float[N,32] x) => (float[N,8] y) {{ {pair} y = Neg(d) }}", **arrays)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    inputs = {"MatMulNBits": ["d", "p", "ps", "ps"], "QLinearReduceMean": ["q", "s", "z", "s", "z"]}[op]
    sizes = {"K": 32, "N": 8, "bits": 4, "block_size": 32} if op == "MatMulNBits" else {"keepdims": 1}
    node = helper.make_node(op, inputs, ["n"], "integers", domain="com.microsoft", **sizes)
    proto.graph.node.insert(2, node)
    proto.graph.node[3].input[0] = "n"
    if op == "QLinearReduceMean":
        proto.graph.node[3].CopyFrom(helper.make_node("DequantizeLinear", ["n", "s", "z"], ["y"]))
    return onnxq.convert(proto, "float").report.warnings


# ---- Absent packages and compilers, workers that die or differ, parts that do not fit.

_ABSENT = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from onnxq.errors import OnnxqError
try:
    import {module} as module
    module.{call}
except OnnxqError as error:
    print(error.code)
"""
# What reads an image: the path, how, and what for.
_IMAGE = "read_image(module.Path('a.png'), module.ImageConfig(size=(4, 4)), module.ValueInfo('x', 1, (1, 3, 4, 4)))"


def run_without(package: str, module: str, call: str) -> str:
    """The code that the call ends with in a process that cannot import the package."""
    code = _ABSENT.format(package=package, module=module, call=call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@reach("Q806")
def no_compiler(_: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXQ_NVCC", "no-such-nvcc")
        find_nvcc()


@reach("Q807", pytest.mark.skipif(sys.platform == "win32", reason="a shell script"))
def failing_compiler(folder: Path):
    bad = written(folder, '#!/bin/sh\n[ "$1" = --version ] && echo bad && exit 0\nexit 1\n', "c++")
    bad.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(bad))
        build_host(folder)


@reach("Q901", pytest.mark.skipif(sys.platform == "win32", reason="signals end no process there"))
def deadly_piece(_: Path):
    workers = ProcessWorkers(1)
    try:
        list(workers.map(die, [WorkPiece("piece 1", 1)]))
    finally:
        workers.close()


@reach("Q902", pytest.mark.skipif(sys.platform == "win32", reason="sockets wait there"))
def no_scheduler(_: Path):
    pytest.importorskip("distributed")
    dask.DaskWorkers("tcp://127.0.0.1:9", patience=0.1)


@reach("Q904")
def daemon(_: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(multiprocessing.current_process()._config, "daemon", True)
        list(ProcessWorkers(1).map(die, [WorkPiece("piece 1", 1)]))


@reach("W128")
def stale_pieces(folder: Path):
    written(folder, b"of another run", "other.piece")
    overrides = {"resume": str(folder), "latency": False}
    return onnxq.quantize(gemm(64, 64), rows(8, 64), EVERYTHING, overrides=overrides).report.warnings


def observe_part(count: int = 8, shard: str = "1/1") -> onnxq.Part:
    return onnxq.calibrate_part(gemm(64, 64), rows(count, 64), EVERYTHING, shard=shard)


# ---- Refusals and warnings.


def list_notes(proto: onnx.ModelProto, data: Any = None, **config: Any) -> list[Any]:
    """Everything a plan says no to or warns of."""
    plan = onnxq.make_plan(proto, data, load_config(None, config))
    return [*plan.refusals, *plan.left_float, *plan.warnings]


def profile_renamed() -> list[Any]:
    other = gemm(64, 64)
    other.graph.node[0].name = "other"
    for tensor in other.graph.initializer:
        tensor.name = f"o{tensor.name}"
    other.graph.node[0].input[1:] = ["ow", "ob"]
    found = onnxq.profile_model(other, quantized().model, rows(8, 64))
    return [*found.fixed, *found.warnings]


@reach("W115")
def on_an_arm(_: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platform.machine", lambda: "aarch64")
        return warn_unmeasured_cpu(onnxq.make_plan(gemm(64, 64)))


@reach("W105")
def bits_attribute(_: Path):
    return onnxq.annotate_bits(quantized().model, overrides={"bits_attribute": True}).warnings


def judge_outputs(*sqnr: float, **more: Any) -> list[Any]:
    check = OutputCheck(name="y", sqnr_db=(sqnr[0], sqnr[1]), cosine=(1.0, 1.0), agreement_db=30.0)
    return list(Report(target="ort", pairs=1, checks=(check,), **more).alarms())


TABLE: dict[str, Provoke] = {
    "Q102": lambda folder: load_model(written(folder, b"\xff\xff\xff", "m.onnx")),
    "Q116": lambda _: GraphIndex(name_nodes(model(RELU))).find_node("none"),
    "Q118": lambda _: strip_markers(model(RELU)),
    "Q201": lambda folder: load_data(folder / "none.npz", [X]),
    "Q203": lambda _: load_data([], [X]),
    "Q207": lambda _: Session(model(RELU)).run({}),
    "Q208": lambda _: Session(model(RELU)).run({"z": rows()["x"]}),
    "Q209": lambda _: load_data({"x": np.zeros((2, 5), F)}, [X]),
    "Q211": lambda _: load_data({"x": np.full((2, 4), np.nan, F)}, [X])[0],
    "Q212": lambda _: load_data(
        {"x": np.zeros((2, 4), F), "z": np.zeros((3, 4), F)}, [X, replace(X, name="z", shape=("N", 4))]
    ),
    "Q216": lambda _: load_data(None, [ValueInfo("x", TensorProto.STRING, (1,))]),
    "Q219": lambda _: load_metric(lambda _: float("nan"))(model(RELU)),
    "Q220": lambda folder: load_texts(folder),
    "Q222": lambda folder: load_texts(folder, tokenizer=str(folder / "none")),
    "Q223": lambda folder: load_texts(folder, tokens=8, tokenizer="bytes"),
    "Q224": lambda folder: load_texts(folder, text=b"a", tokenizer="bytes"),
    "Q301": lambda _: load_config("ort-int9"),
    "W147": lambda _: import_anew("onnxq.compat.qdq_quantizer"),
    "Q323": lambda _: check_loaded(Session(gemm()).native, "CUDAExecutionProvider"),
    "Q302": lambda folder: read_config(folder, "target: ["),
    "Q305": lambda folder: read_config(folder, "target: ort\ntarget: trt"),
    "Q306": lambda folder: read_config(folder, "extends: my.yaml"),
    "Q308": lambda _: parse_drop("little"),
    "Q313": lambda _: QuantSpec(bits=9),
    "Q314": lambda _: onnxq.make_plan(
        gemm(), config=load_config(None, {"rules": [{"between": ["y", "none"], "set": {"float": True}}]})
    ),
    "Q501": lambda _: quantized(
        model("g (float[N,64] x) => (float[N,64] y) { l = Log(x) y = Gemm(l, w) }", w=np.ones((64, 64), F))
    ),
    "Q502": lambda _: create_observer(ObserverSpec("minmax"), QuantSpec(bits=8)).range(),
    "Q504": lambda _: qparams_from_range(np.asarray(2.0), np.asarray(1.0), QuantSpec(bits=8)),
    "Q505": lambda _: parse_cache(b"nonsense\n"),
    "Q506": lambda folder: onnxq.import_calibration(written(folder, f"{HEADER}zzz: 3c010a14\n", "c"), gemm(64, 64)),
    "Q507": lambda folder: onnxq.import_calibration(written(folder, f"{HEADER}input: 3c010a14\n", "c"), network()),
    "W140": lambda _: convert_integers("MatMulNBits"),
    "Q714": lambda _: convert_integers("QLinearReduceMean"),
    "Q702": lambda _: check_interface(gemm(), gemm(4, 5)),
    "Q511": lambda _: join_parts([observe_part(8), observe_part(9)]),
    "Q512": lambda _: join_parts([observe_part(shard="1/2")] * 2),
    "Q513": lambda folder: onnxq.merge_parts([written(folder, "{}", "p.json")]),
    "Q802": lambda _: run_without("torch", "onnxq.qat", "prepare_qat"),
    "Q803": lambda _: run_without("PIL", "onnxq.data.images", _IMAGE),
    "Q804": lambda _: run_without("polygraphy", "onnxq.backends.trt.engine", "load_polygraphy('logger')"),
    "Q809": lambda _: run_without("distributed", "onnxq.workers.dask", "DaskWorkers('tcp://127.0.0.1:9')"),
    "Q810": lambda folder: run_without(
        "tokenizers", "onnxq.data.text", f"load_tokenizer({str(written(folder, '{}', 'tokenizer.json'))!r})"
    ),
    "Q903": lambda _: dask.check_versions({"tcp://10.0.0.7:4711": "0.0.1"}),
    "R100": lambda _: Refusal("mine", "is odd"),
    "R102": lambda _: list_notes(
        model("g (float[1,64,8,8] x, float[64,64,3,3] w) => (float[1,64,6,6] y) { y = Conv(x, w) }")
    ),
    "R113": lambda _: profile_renamed(),
    "F105": lambda _: onnxq.make_plan(gemm(2, 2), rows(8, 2), overrides={"placement": "measured"}).left_float,
    "W101": lambda _: onnxq.quantize(gemm(64, 64), config=EVERYTHING, overrides={"latency": False}).report.warnings,
    "W103": lambda _: list_notes(net(24, 10, ["dense", "dense"])),
    "W148": lambda _: judge_outputs(
        40.0, 40.0, engines=(EngineCheck(engine="E", reason="no kernel", refusal="it too"),)
    ),
    "W110": lambda _: judge_outputs(40.0, 40.0, latency=LatencyRatio(float_ms=1.0, int8_ms=2.0)),
    "W114": lambda _: list_notes(gemm(64, 64), rows(4, 64), effort="high"),
}
for code, provoke in TABLE.items():
    reach(code)(provoke)
