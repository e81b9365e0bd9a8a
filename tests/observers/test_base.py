from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxq.backends import load_config
from onnxq.config import list_presets
from onnxq.errors import CalibrationError, ConfigError
from onnxq.observers import check_observers, create_observer, list_observers, register_observer
from onnxq.observers.base import _REGISTRY
from onnxq.spec import ObserverSpec, QuantSpec

QUANT = QuantSpec(signed=False, symmetric=False)
ALL = ("aciq", "entropy", "minmax", "moving_average", "mse", "percentile")


def test_the_table_is_complete() -> None:
    assert list_observers() == ALL
    assert [name for name in ALL if create_observer(ObserverSpec(name), QUANT).per_sample] == ["moving_average"]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("percentil", {}, "did you mean 'percentile'"),
        ("percentile", {"percentil": 99.9}, "did you mean 'percentile'"),
        ("percentile", {"percentile": 101}, r"outside \(50, 100\]"),
        ("percentile", {"percentile": "99.9"}, "is not a float"),
        ("percentile", {"percentile": True}, "is not a float"),
        ("mse", {"bins": 100}, "outside 2048"),
        ("mse", {"bins": 4096.0}, "is not a int"),
        ("minmax", {"bins": 4096}, "has no option 'bins'"),
        ("aciq", {"distribution": "gauss"}, "did you mean 'gaussian'"),
    ],
)
def test_wrong_names_options_and_values_are_config_errors(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        create_observer(ObserverSpec(name, tuple(sorted(options.items()))), QUANT)


@pytest.mark.parametrize(
    ("text", "line", "path", "says"),
    [
        ("activations:\n  observer: {name: percentile, percentile: 0}", 2, "activations.observer", "outside (50, 100]"),
        ("mode: weight-only\nactivations: {observer: percentil}", 2, "activations.observer", "does not exist"),
        ("weights: {observer: entropy}", 1, "weights.observer", "is not one that weights have"),
        ("weights: {observer: {name: mse, bins: 4096}}", 1, "weights.observer", "takes no option 'bins'"),
        ("rules:\n  - op: Conv\n    set: {observer: {name: mse, bins: 1}}", 3, "rules[0].set.observer", "outside 2048"),
        ("rules: [{op: A, role: weight, set: {observer: aciq}}]", 1, "rules[0].set.observer", "that weights have"),
    ],
)
def test_a_configuration_is_told_of_them_with_its_line(
    tmp_path: Path, text: str, line: int, path: str, says: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_observers(load_config(file))
    assert caught.value.subject == f"{file}:{line}: {path}"
    assert says in caught.value.cause
    assert caught.value.code in ("Q310", "Q311")


@pytest.mark.parametrize(
    "observer", ["mse", "entropy", {"name": "mse", "bins": 4096}, {"name": "mse", "signed_scales": True}]
)
def test_a_rule_for_all_kinds_of_tensors_may_name_what_one_of_them_has(observer: str | dict[str, object]) -> None:
    # Negative scales are for blocks of weights alone.
    preset = "ort-int4-weights" if "signed_scales" in observer else "ort-int8"
    check_observers(load_config(preset, {"rules": [{"op": "Conv", "set": {"observer": observer}}]}))


@pytest.mark.parametrize("name", list_presets())
def test_presets_name_observers_that_are_there(name: str) -> None:
    check_observers(load_config(name))


@pytest.mark.parametrize("name", ["entropy", "aciq"])
def test_fp8_is_refused_where_levels_must_be_even(name: str) -> None:
    with pytest.raises(ConfigError, match="needs evenly spaced levels"):
        create_observer(ObserverSpec(name), QuantSpec(storage="float8e4m3fn"))


def test_options_reach_the_observer() -> None:
    values = np.arange(1001, dtype=np.float32)
    ends = []
    for percentile in (90, 99.0):
        observer = create_observer(ObserverSpec("percentile", (("bins", 2048), ("percentile", percentile))), QUANT)
        observer.update(values)
        ends.append([float(end) for end in observer.range()])
    assert ends[0] == pytest.approx([50, 950], abs=1.5)
    assert ends[1] == pytest.approx([5, 995], abs=1.5)


@pytest.mark.parametrize("name", ALL)
def test_nan_and_inf_are_errors_that_leave_the_observer_as_it_was(name: str) -> None:
    observer = create_observer(ObserverSpec(name), QUANT)
    observer.update(np.float32([-1, 2, 5]))
    before = observer.range()
    cases = {np.nan: "1 NaN and 0 inf", np.inf: "0 NaN and 1 inf", -np.inf: "0 NaN and 1 inf", 1e300: "0 NaN and 1 inf"}
    for bad, says in cases.items():
        # 1e300 is beyond float32.
        values = np.zeros((2, 3))
        values[1, 2] = bad
        with pytest.raises(CalibrationError, match=rf"{says} among 6 values, the first at \(1, 2\)"):
            observer.update(values)
    assert observer.range() == before
    assert observer.count == 3


@pytest.mark.parametrize("name", ALL)
def test_no_value_is_an_error_and_an_empty_array_is_none(name: str) -> None:
    observer = create_observer(ObserverSpec(name), QUANT)
    observer.update(np.zeros((0, 3), np.float32))
    assert observer.count == 0
    with pytest.raises(CalibrationError, match=rf"{name} observer: saw no value"):
        observer.range()
    observer.merge(create_observer(ObserverSpec(name), QUANT))
    with pytest.raises(CalibrationError):
        observer.range()


@pytest.mark.parametrize("name", ALL)
def test_any_float_type_shape_and_stride_is_taken(name: str) -> None:
    plain = np.float32([[1.5, -2.0, 0.0], [0.25, 8.0, -0.5]])
    wanted = create_observer(ObserverSpec(name), QUANT)
    wanted.update(plain)
    types = (np.float16, np.float64, ml_dtypes.bfloat16)
    for values in (*(plain.astype(kind) for kind in types), plain.T, plain[:, ::-1]):
        observer = create_observer(ObserverSpec(name), QUANT)
        observer.update(values)
        assert observer.range() == wanted.range()
    scalar = create_observer(ObserverSpec(name), QUANT)
    scalar.update(np.asarray(3.0, np.float32))
    assert scalar.count == 1
    assert [float(end) for end in scalar.range()] == [3.0, 3.0]


@pytest.mark.parametrize("name", ALL)
def test_only_the_same_kind_merges(name: str) -> None:
    other = "minmax" if name != "minmax" else "mse"
    with pytest.raises(TypeError, match="cannot merge"):
        create_observer(ObserverSpec(name), QUANT).merge(create_observer(ObserverSpec(other), QUANT))


def test_people_add_their_own() -> None:
    class Half:
        per_sample = False
        count = 1

        def __init__(self, quant: QuantSpec, *, share: float = 0.5) -> None:
            self.share = share

    try:
        register_observer("half")(Half)
        assert "half" in list_observers()
        made: Any = create_observer(ObserverSpec("half", (("share", 1),)), QUANT)
        assert made.share == 1
        with pytest.raises(ConfigError, match="registered already"):
            register_observer("half")(Half)
    finally:
        _REGISTRY.pop("half", None)
