"""What provokes Q0xx, Q1xx and Q2xx."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from onnxq import errors
from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.evaluation.metric import load_metric
from onnxq.graph import GraphIndex, ValueInfo, load_model, name_nodes
from onnxq.interop import strip_markers
from onnxq.runtime import Session
from tests.codes.kit import F, X, model, reach, reach_each, rows, written
from tests.data.text.kit import make_decoder

RELU = "g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }"


def raising(kind: type[errors.OnnxqError]):
    """A person's own code raises an error of this class without a code."""

    def provoke(_: Path):
        def samples():
            raise kind("mine", "is odd")
            yield

        load_data(samples(), [X])

    return provoke


for _kind in errors.OnnxqError.__subclasses__():
    if _kind.__module__ == errors.__name__:
        reach(_kind.default_code)(raising(_kind))
reach("Q000")(raising(errors.OnnxqError))


@reach("Q115")
def a_foreign_engine_fails(_: Path):
    pytest.importorskip("polygraphy")
    from onnxq.backends.trt.run import load_polygraphy, translate_errors

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


def texts(folder: Path, tokens: int = 256, text: bytes = b"some text of some words", **asked: object) -> None:
    """Load a text for a decoder."""
    named = name_nodes(make_decoder(caches=False, tokens=tokens))
    (folder / "a.txt").write_bytes(text)
    load_data(folder / "a.txt", GraphIndex(named).inputs, DataConfig(**asked), named)


reach_each(
    {
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
        "Q220": lambda folder: texts(folder),
        "Q222": lambda folder: texts(folder, tokenizer=str(folder / "none")),
        "Q223": lambda folder: texts(folder, tokens=8, tokenizer="bytes"),
        "Q224": lambda folder: texts(folder, text=b"a", tokenizer="bytes"),
    }
)
