"""Outputs side by side: numbers wherever they stand, nothing where there are none, and both interfaces."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnxq.errors import VerificationError
from onnxq.evaluation.compare import ModelErrors, check_interface, compare_models


class _Gives:
    def __init__(self, value: object) -> None:
        self.value = value

    def run(self, feeds: object, /) -> dict:
        return {"out": self.value}


@pytest.mark.parametrize(
    ("reference", "other", "db"),
    [
        ([np.ones(4), np.ones(2)], [np.ones(4), np.ones(2)], np.inf),
        ([np.ones(4), np.ones(4)], [np.ones(4), np.full(4, 1.1)], 10 * np.log10(8 / (4 * 0.01))),
        ([np.ones(4)], [np.ones(4), np.ones(4)], -np.inf),
        ([np.ones(4)], [np.ones(3)], -np.inf),
        ([{"a": 1.0, "b": 2.0}], [{"b": 2.0, "a": 1.0}], np.inf),
        ([{"a": 1.0, "b": 2.0}], [{"a": 1.0, "c": 2.0}], -np.inf),
        (np.ones(4), None, -np.inf),
    ],
)
def test_values_in_sequences_and_maps_are_compared_place_by_place(reference: object, other: object, db: float) -> None:
    (found,) = compare_models({"": (_Gives(reference), _Gives(other))}, [{}])[""]
    assert found.sqnr_db == pytest.approx(db)


@pytest.mark.parametrize("value", [["a", "b"], np.array(["a"]), [], None, [{"a": "b"}]])
def test_what_holds_no_numbers_gives_no_figure(value: object) -> None:
    assert compare_models({"": (_Gives(value), _Gives(value))}, [{}])[""] == ()


def test_a_session_of_several_pairs_runs_once_a_sample() -> None:
    runs: list[object] = []

    class Counts(_Gives):
        def run(self, feeds: object, /) -> dict:
            runs.append(self)
            return super().run(feeds)

    reference, one, two = (Counts(np.full(4, value)) for value in (1.0, 1.1, 1.01))
    found = compare_models({"a": (reference, one), "b": (reference, two)}, [{}, {}])
    assert len(runs) == 2 * 3
    assert [found[label][0].sqnr_db for label in "ab"] == pytest.approx([20, 40])


def test_the_mean_noise_of_outputs_and_the_worst_of_them() -> None:
    errors = ModelErrors()
    reference = {"good": np.ones(4), "bad": np.ones(4), "same": np.ones(4)}
    for _ in range(2):
        errors.update({}, reference, {"good": np.full(4, 1.01), "bad": np.full(4, 1.1), "same": np.ones(4)})
    assert errors.noise() == pytest.approx((1e-4 + 1e-2) / 3)
    assert errors.worst_db() == errors.likely_db() == pytest.approx(20)
    once = ModelErrors()
    once.update({}, {"y": np.ones(4)}, {"y": np.full(4, 1.1)})
    assert once.likely_db() == pytest.approx(20 - 10 * np.log10(2))  # one sample says nothing of others
    assert ModelErrors().noise() == 0.0
    assert ModelErrors().worst_db() == np.inf


def test_interfaces_must_be_the_same() -> None:
    def model(name: str, size: int) -> object:
        values = [[helper.make_tensor_value_info(one, TensorProto.FLOAT, [size])] for one in ("x", name)]
        return helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], [name])], "g", *values))

    check_interface(model("y", 4), model("y", 4))  # type: ignore[arg-type]
    for other in (model("z", 4), model("y", 5)):
        with pytest.raises(VerificationError):
            check_interface(model("y", 4), other)  # type: ignore[arg-type]
