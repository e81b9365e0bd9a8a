"""The fields of an error: kept across processes, found again in other words, with the file they are about."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from onnxq.errors import ConfigError, Location, ModelError, OnnxqError, PlanError
from onnxq.sites import Caution


def fields(error: OnnxqError) -> tuple[object, ...]:
    return tuple(getattr(error, name) for name in ("code", "kind", "subject", "cause", "fix", "file", "line"))


@pytest.mark.parametrize(
    "error",
    [
        ModelError("conv", "is odd"),
        ConfigError(Location("my.yaml", 3, "rules[0]"), "is odd", "mend it", code="Q304"),
        PlanError(Path("p.json"), "is odd", code="Q401", line=7),
    ],
)
def test_an_error_crosses_processes_with_its_fields(error) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert fields(again) == fields(error)


def fail(path: str) -> None:
    raise ConfigError(Location(path, 2), "is odd", code="Q302")


def test_an_error_comes_out_of_a_worker() -> None:
    with ProcessPoolExecutor(1) as pool, pytest.raises(ConfigError, match=r"a.yaml:2: is odd \[Q302\]") as caught:
        pool.submit(fail, "a.yaml").result()
    assert (caught.value.file, caught.value.line, caught.value.code) == ("a.yaml", 2, "Q302")


def test_other_words_keep_code_and_place() -> None:
    error = ConfigError(Location("a.yaml", 2), "is odd", "mend it", code="Q302")
    again = error.replace_text(cause="is even")
    assert (again.subject, again.cause, again.fix) == ("a.yaml:2", "is even", "mend it")
    assert fields(again)[:2] + fields(again)[5:] == fields(error)[:2] + fields(error)[5:]


def test_a_path_as_subject_is_the_file() -> None:
    error = ModelError(Path("models/m.onnx"), "is empty")
    assert (error.subject, error.file, error.line) == (str(Path("models/m.onnx")), str(Path("models/m.onnx")), None)


def test_a_model_without_a_name_leaves_no_colon_alone() -> None:
    assert str(PlanError("", "has no samples", code="Q405")) == "has no samples [Q405]"


def test_a_warning_is_its_text_with_a_code() -> None:
    again = pickle.loads(pickle.dumps(Caution("W101", "made up")))
    assert (again, again.code) == ("made up", "W101")
