"""YAML and presets into Config: what is accepted, and that every fault says where it is and what was meant."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxq.cli.options import name_options
from onnxq.config import Config, TensorConfig, check_trust, list_code, list_presets, read_config, read_preset
from onnxq.errors import ConfigError
from onnxq.spec import FLOAT8, ObserverSpec, PerBlock, PerChannel, QuantSpec
from tests.config.kit import read, write


def test_default_is_the_preset_ort_int8_and_equals_the_types_defaults(tmp_path):
    default = read_config()
    assert default.source == "ort-int8"
    assert default == read_config("ort-int8")
    for found in (default, read(tmp_path, "# nothing\n")):
        assert found.model_dump(exclude={"source"}) == Config().model_dump(exclude={"source"})


def test_all_faults_of_files_are_told_at_once_with_their_places(tmp_path):
    base = write(tmp_path, "\nweights: {bits: 1}", "base.yaml")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "extends: base.yaml\nplacment: rules\nbias: int8\n")
    places = [f"{base}:2: weights.bits: ", f"{tmp_path}/c.yaml:2: placment: ", f"{tmp_path}/c.yaml:3: bias: "]
    assert [place for place in places if place not in str(caught.value)] == []


def test_missing_file_and_unknown_preset_name_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file(.|\n)*ort-int8"):
        read_config(tmp_path / "ort-int8-ms.yaml")
    with pytest.raises(ConfigError, match=r"no preset(.|\n)*'ort-int8-mse'"):
        read_config("ort-int8-msee")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)


# A few keys each, of which the rest of their section must not change.
PARTS = [
    "activations: {observer: {name: percentile}}",
    "weights: {observer: mse}\nskip: rounding",
    "activations: {observer: mse}\nweights: {bits: 4}",
    "effort: fast",
]


@pytest.mark.parametrize("text", PARTS)
@pytest.mark.parametrize("target", ["", "ort", "trt", "virtual"])
def test_a_file_that_extends_nothing_starts_from_the_preset_of_its_target(tmp_path, target, text):
    own = f"target: {target}\n{text}" if target else text
    said = read(tmp_path, f"extends: {target or 'ort'}-int8\n{text}", "said.yaml")
    for found in (read(tmp_path, own), read_config(write(tmp_path, text), target=target or None)):
        assert found.model_dump(exclude={"source"}) == said.model_dump(exclude={"source"})


def test_the_target_of_a_file_holds_for_those_that_it_extends(tmp_path):
    write(tmp_path, "weights: {observer: mse}\n", "base.yaml")
    found = read(tmp_path, "extends: base.yaml\ntarget: trt\n")
    assert found.activations == read_config("trt-int8").activations
    assert (found.weights.observer.name, found.bias) == ("mse", "float")


def test_a_target_without_a_preset_has_that_of_the_default(tmp_path):
    found = read_config(write(tmp_path, "weights: {observer: mse}"), target="mine")
    assert found.target == "mine"
    assert found.weights == TensorConfig(granularity="channel", signed=True, observer=ObserverSpec("mse"))
    assert read_config(None, target="mine").activations == read_config().activations


@pytest.mark.parametrize("config", [Config(), Config(bias="float"), Config(weights=TensorConfig(bits=4))])
def test_a_part_of_a_section_keeps_the_rest_of_a_configuration_made_in_python(config):
    found = read_config(config, {"activations.observer": "mse", "weights.observer": "mse"})
    mse = {"observer": ObserverSpec("mse")}
    assert found.activations == config.activations.model_copy(update=mse)
    assert found.weights == config.weights.model_copy(update=mse)
    assert found.bias == config.bias


def test_extends_keeps_what_is_not_said_and_puts_own_rules_first(tmp_path):
    write(tmp_path, "extends: ort-int8-mse\nrules:\n  - op: Add\n    set: {float: true}\n", "base.yaml")
    rules = "rules:\n  - op: Conv\n    set: {bits: 4}\n"
    found = read(tmp_path, f"extends: base.yaml\nactivations: {{observer: entropy}}\n{rules}")
    assert found.activations == TensorConfig(scheme="asymmetric", signed=False, observer=ObserverSpec("entropy"))
    assert found.weights.observer.name == "mse"
    assert [(rule.op, rule.source, rule.line) for rule in found.rules] == [
        (("Conv",), str(tmp_path / "c.yaml"), 4),
        (("Add",), str(tmp_path / "base.yaml"), 3),
    ]
    assert str(found.where("rules[1].op")) == f"{tmp_path / 'base.yaml'}:3: rules[1].op"


def test_overrides_by_dotted_path_or_nested_and_none_is_not_given():
    found = read_config("ort-int8", {"data.samples": 3, "data": {"seed": 4}, "weights.bits": None, "bias": "float"})
    assert (found.data.samples, found.data.seed, found.weights.bits, found.bias) == (3, 4, 8, "float")
    assert read_config(found, {"data.batch": 2}).data.model_dump() == {**found.data.model_dump(), "batch": 2}
    assert read_config(found) is found


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["weights"] = HOLDS_ITSELF
RULES_IN_THEMSELVES: list[Any] = []
RULES_IN_THEMSELVES.append(RULES_IN_THEMSELVES)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"data.samples": 0}, "option: data.samples: must be greater"),
        ({"dta.seed": 1}, "option: dta: unknown key 'dta' [Q303]\n  fix: did you mean 'data'?"),
        ({"rules": [{"op": "*", "quantize": True}]}, "rules[0].quantize: unknown key 'quantize'"),
        ({"rules": [{"op": "*", "set": {"bitz": 8}}]}, "did you mean 'bits'"),
        ({1: 2}, "a key is a word"),
        ({"rules": RULES_IN_THEMSELVES}, "option"),
        (HOLDS_ITSELF, "holds a value inside itself"),
        *(({"effort": value}, "effort") for value in (object(), {1, 2}, b"fast", 3j, len)),
        # Values from Python are held to what files are.
        ({"data.samples": "8"}, "must be a valid integer, not '8'"),
        ({"data.samples": True}, "must be a valid integer, not True"),
        ({"weight_bits_budget": float("nan")}, "must be a finite number"),
        ({"accuracy.metric": 3}, "must be file.py:function, or a function of a model"),
        ({"accuracy.max_drop": True}, "must be 0.01 (absolute) or 1%"),
        ({"budget": -1}, "must be greater than 0"),
        ({"diff": 3}, "must be a mapping of keys to values"),
    ],
)
def test_overrides_that_cannot_be_are_named(overrides: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        read_config(None, overrides)
    assert (caught.value.file, caught.value.line) == ("", None)


P99 = {"name": "percentile", "percentile": 99.0}
P99_WEIGHTS = TensorConfig(
    granularity="channel", signed=True, observer=ObserverSpec("percentile", (("percentile", 99.0),))
)


@pytest.mark.parametrize(
    "overrides",
    [
        {"weights.observer": P99},
        {"weights": {"observer": P99}},
        {"weights": {"observer.name": "percentile"}, "weights.observer": P99},
        {"weights": P99_WEIGHTS},
    ],
)
def test_a_value_has_many_forms_in_python(overrides):
    assert read_config("ort-int8-mse", overrides).weights == P99_WEIGHTS


@pytest.mark.parametrize("value", [np.int64(3), np.int32(3), np.array(3), 3])
def test_numbers_of_numpy_are_numbers(value):
    assert read_config(None, {"data.samples": value}).data.samples == 3
    assert read_config(None, {"data.images": {"size": np.array([3, 4])}}).data.images.size == (3, 4)


def test_rules_of_an_override_come_first():
    base = read_config(None, {"rules": [{"op": "Add", "set": {"float": True}}]})
    both = read_config(base, {"rules": [{"op": "Conv", "set": {"bits": 4}}]})
    assert [rule.op for rule in both.rules] == [("Conv",), ("Add",)]
    assert [rule.op for rule in base.rules] == [("Add",)]


def test_a_configuration_keeps_its_places_under_overrides(tmp_path):
    path = write(tmp_path, "effort: fast\nweights:\n  bits: 4\n")
    config = read_config(read_config(path), {"data.samples": 3})
    assert str(config.where("weights.bits")) == f"{path}:3: weights.bits"
    assert str(config.where("data.samples")) == "option: data.samples"
    assert config.source == str(path)
    with pytest.raises(ConfigError) as caught:
        read_config(config, {"weights.storage": "int8", "weights.granularity": "block"})
    assert caught.value.subject == "option: weights"


# ---- The presets in configs/.

INT8 = QuantSpec(bits=8, signed=True, granularity=PerChannel(0))
EXPECTED = {
    "ort-int8": ("static", "minmax", INT8),
    "ort-dynamic-embeddings": ("dynamic", "minmax", INT8),
    "ort-dynamic": ("dynamic", "minmax", INT8),
    "ort-int8-percentile": ("static", "percentile", INT8),
    "ort-int8-mse": ("static", "mse", INT8),
    "ort-int8-entropy": ("static", "entropy", INT8),
    "ort-int8-weights": ("weight-only", "minmax", INT8),
    "ort-int4-weights": (
        "weight-only",
        "minmax",
        QuantSpec(bits=4, signed=False, symmetric=False, granularity=PerBlock(0, 32), storage="uint4"),
    ),
    "ort-w4a8": (
        "static",
        "minmax",
        QuantSpec(bits=4, signed=True, narrow_range=True, granularity=PerChannel(0), storage="int4"),
    ),
    "ort-uint16-activations": ("static", "minmax", INT8),
    "trt-int8": ("static", "percentile", INT8),
    "trt-fp8": ("static", "minmax", QuantSpec(granularity=PerChannel(0), storage=FLOAT8)),
    "trt-fp16": ("float", "percentile", INT8),
    "trt-int4-weights": ("weight-only", "percentile", QuantSpec(bits=4, granularity=PerBlock(0, 128), storage="int4")),
    "openvino-int8": ("static", "minmax", INT8),
    "openvino-int8-weights": ("weight-only", "minmax", INT8),
    "qnn": ("static", "minmax", INT8),
    "qnn-int8": ("static", "minmax", INT8),
    "qnn-mixed": ("static", "minmax", INT8),
    "qnn-a16w8": ("static", "minmax", INT8),
    "qnn-w4a16": ("static", "minmax", QuantSpec(bits=4, signed=True, granularity=PerChannel(0), storage="int4")),
    "web-int8": ("static", "minmax", INT8),
    "web-dynamic": ("dynamic", "minmax", INT8),
    "web-int8-weights": ("weight-only", "minmax", INT8),
    "virtual-int8": ("static", "minmax", INT8),
}


def test_every_preset_is_listed_here():
    assert set(list_presets()) == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_preset_says_what_its_name_says(name):
    config = read_config(name)
    mode, observer, weights = EXPECTED[name]
    percentile = 99.9993 if config.target == "trt" else 99.999
    options = (("percentile", percentile),) if observer == "percentile" else ()
    assert (config.mode, config.weights.spec(0)) == (mode, weights)
    assert config.activations.observer == ObserverSpec(observer, options)
    bits = 16 if name in ("ort-uint16-activations", "qnn-a16w8", "qnn-w4a16") else 8
    activations = QuantSpec(bits=bits, signed=False, symmetric=False)
    if name.startswith("trt-"):
        activations = QuantSpec(storage=FLOAT8 if name == "trt-fp8" else "int8")
    assert config.activations.spec(None) == activations


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_preset_is_commented_for_a_person(name):
    assert read_preset(name).startswith("# ")


# ---- Code that a file names is run only where the file is trusted, or where the caller names the code, too.

ASKING = {
    "runtime.libraries": "runtime: {libraries: ops.so}",
    "runtime.plugins": "runtime:\n  plugins: [ops.so]",
    "accuracy.metric": "accuracy: {metric: 'evaluate.py:score'}",
    "variants.metric": "variants: {metric: 'evaluate.py:score'}",
    # Objects come from there pickled, and unpickling runs code.
    "scale.dask": "scale: {dask: 'tcp://somewhere:8786'}",
}


def refuse(config: Config, overrides: dict[str, object] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_trust(config, overrides or {})
    assert caught.value.code == "Q324"
    return caught.value


@pytest.mark.parametrize("path", ASKING)
def test_a_file_that_names_code_wants_trust_or_the_same_from_the_caller(tmp_path: Path, path: str) -> None:
    file = write(tmp_path, f"target: ort\n{ASKING[path]}\n", "my.yaml")
    config = read_config(file)
    ((_, code),) = list_code(config)
    error = refuse(config)
    assert (error.file, error.line) == (str(file), 3 if "\n" in ASKING[path] else 2)
    assert path in error.subject
    assert code in error.cause
    assert f"--trust {file}" in name_options(error.fix)
    assert code in error.fix
    given = [code] if path.startswith("runtime") else code
    check_trust(read_config(config, {path: given}), {path: given})
    section, key = path.split(".")
    check_trust(read_config(config, {section: {key: given}}), {section: {key: given}})
    check_trust(read_config(file, {"trust": str(file)}), {})
    check_trust(read_config(file, {"trust": [str(tmp_path / ".." / tmp_path.name / "my.yaml")]}), {})
    refuse(read_config(file, {"trust": str(tmp_path / "other.yaml")}))


def test_another_value_of_the_caller_leaves_nothing_to_trust_but_lists_are_joined(tmp_path: Path) -> None:
    file = write(tmp_path, "accuracy: {metric: 'a.py:f'}\n")
    check_trust(read_config(file, {"accuracy.metric": "b.py:f"}), {"accuracy.metric": "b.py:f"})
    write(tmp_path, "runtime: {libraries: a.so}\n")
    given = {"runtime.libraries": ["b.so"]}
    assert "a.so" in refuse(read_config(file, given), given).cause


def test_the_file_that_names_the_code_is_the_one_to_trust(tmp_path: Path) -> None:
    base = write(tmp_path, "runtime: {libraries: [a.so, b.so]}\n", "base.yaml")
    file = write(tmp_path, "extends: base.yaml\nruntime: {libraries: c.so}\n")
    assert refuse(read_config(file)).file == str(file)
    assert refuse(read_config(file, {"trust": str(file)})).file == str(base)
    check_trust(read_config(file, {"trust": [str(file), str(base)]}), {})


def test_no_file_trusts_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml:1: trust: unknown key 'trust'"):
        read(tmp_path, f"trust: [{tmp_path / 'my.yaml'}]\n", "my.yaml")


def test_what_python_gives_needs_none() -> None:
    check_trust(read_config(None, {"runtime": {"libraries": ["a.so"]}, "accuracy": {"metric": len}}), {})
    check_trust(read_config("trt-int8"), {})
    check_trust(Config(), {})
