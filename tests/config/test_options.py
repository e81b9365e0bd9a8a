"""Options: each listed once, with a name of its own in every command, and checked as files are."""

import re
from collections import Counter

import numpy as np
import pytest

from onnxq.config import Command, Config, expand_names, list_options, parse_setting, read_config
from onnxq.config.model import Option
from onnxq.errors import ConfigError


def option(path: str) -> Option:
    (found,) = [one for one in list_options() if one.path == path]
    return found


@pytest.mark.parametrize("command", list(Command))
def test_no_two_options_of_a_command_share_a_name_or_a_flag(command: Command) -> None:
    options = list_options(command)
    for names in ([one.name for one in options], [flag for one in options for flag in one.flags]):
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_no_name_hides_another_key_of_the_configuration() -> None:
    assert [one.name for one in list_options() if one.name != one.path and one.name in Config.model_fields] == []


@pytest.mark.parametrize("one", list_options(), ids=lambda one: one.path)
def test_every_option_is_a_field_with_a_meaning_and_a_command(one: Option) -> None:
    assert one.commands
    assert one.field.description
    assert one.field.description[-1] in ".…;]"
    assert one.metavar or one.choices or one.field.annotation is bool
    # The default is what the configuration has without it.
    value: object = Config()
    for part in one.path.split("."):
        value = getattr(value, part)
    assert value == one.field.default


@pytest.mark.parametrize(
    ("path", "flags", "help_ends"),
    [
        ("effort", ("--effort",), "[default: balanced]"),
        ("verify.latency", ("--no-latency",), "quantized model."),
        ("prove.timeout", ("--timeout",), "[default: 600]"),
        ("data.seed", ("--seed",), "[default: 0]"),
        ("runtime.libraries", ("--ort-library",), "repeatable."),
        ("output.bits_attribute", ("--emit-bits-attribute", "--bits-attribute"), "refuse the file."),
    ],
)
def test_flags_and_help_come_from_the_field(path: str, flags: tuple[str, ...], help_ends: str) -> None:
    assert option(path).flags == flags
    assert option(path).help.endswith(help_ends)


def test_the_form_of_a_value_comes_from_its_type() -> None:
    assert option("cpu").choices == ("any", "vnni", "avx2")
    assert (option("accuracy_level").choices, option("accuracy_level").metavar) == ((0, 1, 2, 3, 4), "")
    assert option("diff.engines").choices == ()  # several of them, with commas between
    assert (option("data.samples").is_whole, option("data.samples").bounds) == (True, (1, None))
    assert (option("weight_bits_budget").is_whole, option("weight_bits_budget").bounds) == (False, (2, 16))
    assert not option("data.memory_limit").is_whole
    assert [one.path for one in list_options() if one.repeatable] == [
        "trust", "fix", "diff.load", "prove.require", "prove.require_int8", "prove.forbid", "prove.shapes",
        "bench.shapes", "runtime.libraries", "runtime.plugins",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("budget", "90", 90.0),
        ("budget", "90s", 90),
        ("budget", "1.5h", 5400),
        ("budget", "0.5 m", 30),
        ("profile.by", "", ()),
        ("profile.by", "site, node,site", ("site", "node")),
        ("profile.by", ",segment,", ("segment",)),
        ("data.memory_limit", "1.5GiB", 3 * 2**29),
        ("data.memory_limit", " 1 gb", 10**9),
        ("data.memory_limit", "64k", 64_000),
        ("accuracy.min_sqnr", "-3.5", -3.5),
        ("diff.engines", "trt, ort,trt", ("trt", "ort")),
    ],
)
def test_text_of_the_command_line_is_read_by_the_field(path: str, text: str, value: object) -> None:
    assert option(path).parse(text) == value
    # As in a file.
    head, _, key = path.partition(".")
    config = read_config(None, {path: text}) if path != "accuracy.min_sqnr" else read_config(None, {path: value})
    assert getattr(getattr(config, head), key) == value if key else getattr(config, head) == value


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("budget", "5d", "'5d' is no time; write it as 90s, 10m or 1.5h"),
        ("budget", "0", "is no time"),
        ("budget", "inf", "'inf' is no time"),
        ("budget", "9" * 400, "is no time"),
        ("data.memory_limit", "3XB", "'3XB' is no amount of memory"),
        ("data.memory_limit", "9" * 400, "is no amount of memory"),
        ("accuracy.min_sqnr", "inf", "must be a finite number"),
        ("weight_bits_budget", "17", "must be less than or equal to 16"),
        ("weight_bits_budget", "nan", "must be a finite number"),
        ("profile.by", "nodes", "'nodes' is not one of node, segment, site; did you mean 'node'?"),
    ],
)
def test_text_that_does_not_fit_is_refused_in_words(path: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        option(path).parse(text)


def test_names_become_paths_by_their_command() -> None:
    given = {"min_sqnr": 30, "samples": 4, "weights.bits": 4, "rules": [], "ort_library": "a.so"}
    assert expand_names(given, Command.QUANTIZE) == {
        "accuracy.min_sqnr": 30, "data.samples": 4, "weights.bits": 4, "rules": [], "runtime.libraries": "a.so",
    }  # fmt: skip
    assert expand_names({"min_sqnr": 30, "threads": 2}, Command.DIFF) == {"diff.min_sqnr": 30, "verify.threads": 2}
    assert expand_names({"samples": 4, "threads": 2}, Command.PROVE) == {"prove.samples": 4, "prove.threads": 2}
    assert expand_names(None, Command.PLAN) == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_sqrn": 30}, "option: min_sqrn: unknown key [Q303]\n  fix: did you mean 'min_sqnr'"),
        ({"weigths.bits": 4}, "did you mean 'weights'"),
        ({"layers": True}, "option: layers: unknown key"),
        ({3: 4}, "option: 3: unknown key"),
    ],
)
def test_an_unknown_name_has_its_nearest(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        expand_names(given, Command.QUANTIZE)


def test_functions_and_numpys_numbers_are_values() -> None:
    config = read_config(
        None, {"accuracy.metric": len, "data.samples": np.int64(3), "accuracy.min_sqnr": np.float32(2)}
    )
    assert config.accuracy.metric is len
    assert (config.data.samples, config.accuracy.min_sqnr) == (3, 2.0)
    assert isinstance(hash(config), int)
    assert read_config(config, {"data.seed": 1}).accuracy.metric is len


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("weights.bits=4", ("weights.bits", 4)),
        ("skip=[a, b]", ("skip", ["a", "b"])),
        ("data.images={size: 32}", ("data.images", {"size": 32})),
        ("budget=10m", ("budget", "10m")),
        ("prove.require_int8=a=b", ("prove.require_int8", "a=b")),
    ],
)
def test_a_setting_is_a_key_and_yaml(text: str, found: tuple[str, object]) -> None:
    assert parse_setting(text) == found


@pytest.mark.parametrize("text", ["weights.bits", "=4", "weights.bits=", "skip=[a", "a={1: 2}"])
def test_a_setting_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"weights\.bits|not YAML|must be a word|KEY=VALUE"):
        parse_setting(text)
