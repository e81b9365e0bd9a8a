"""Inputs that never end are refused, in little memory and time."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from onnxq.backends import load_config
from onnxq.commands.apply import read_plan
from onnxq.data import load_data
from onnxq.errors import CalibrationError, ConfigError, DataError, ModelError, OnnxqError, PlanError
from onnxq.graph import ValueInfo, load_model
from onnxq.interop import read_scales

pytestmark = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero and pipes")

_X = ValueInfo("x", 1, ("N", 3))
_READERS = {
    "model": (load_model, ModelError, ".onnx"),
    "config": (load_config, ConfigError, ".yaml"),
    "plan": (read_plan, PlanError, ".json"),
    "cache": (read_scales, CalibrationError, ".cache"),
    **{f"data{end}": (lambda path: load_data(path, [_X]), DataError, end) for end in (".npz", ".npy", ".pb")},
    **{f"data{end}": (lambda path: load_data(path, [_X]), DataError, end) for end in (".json", ".py")},
}


def _endless(pipe: Path) -> None:
    with suppress(BrokenPipeError), pipe.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


@pytest.mark.parametrize("kind", _READERS)
@pytest.mark.parametrize("source", ["device", "pipe", "sparse"])
def test_what_has_no_end_is_refused_in_words(tmp_path: Path, kind: str, source: str) -> None:
    read, error, end = _READERS[kind]
    path = tmp_path / f"given{end}"
    if source == "device":
        path.symlink_to("/dev/zero")
    elif source == "sparse":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        os.mkfifo(path)
        # Readers that refuse a pipe never open it, so the writer may wait for ever.
        threading.Thread(target=_endless, args=(path,), daemon=True).start()
    with pytest.raises(OnnxqError) as caught:
        read(str(path))
    assert type(caught.value) is error
    assert str(path) in caught.value.subject


def test_short_texts_may_come_through_pipes(tmp_path: Path) -> None:
    """As `--config <(...)` of a shell."""
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("extends: trt-int8\n",))
    writer.start()
    assert load_config(str(pipe)).target == "trt"
    writer.join()


def test_a_name_that_is_too_long_is_told() -> None:
    for read, error, end in _READERS.values():
        with pytest.raises(error):
            read("n" * 300 + end)
