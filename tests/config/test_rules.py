"""Rules: which names they select, what they make of a wish, how they are called in messages."""

import pytest

from onnxq.config import Command, Config, Rule, RuleSet, TensorConfig, expand_names, list_options, read_config
from onnxq.errors import ConfigError, find_nearest, suggest_names
from onnxq.sites import Role
from onnxq.spec import ObserverSpec
from tests.config.kit import write


def rule(**raw) -> Rule:
    return read_config(None, {"rules": [raw]}).rules[0]


def test_all_selectors_given_must_hold():
    found = rule(node="a*", op=["Conv", "Gemm"], role="weight", set={"bits": 4})
    assert found.selects(node="ab", op="Gemm", tensor="t", role=Role.WEIGHT)
    assert not found.selects(node="ab", op="MatMul", tensor="t", role=Role.WEIGHT)
    assert not found.selects(node="ab", op="Gemm", tensor="t", role=Role.ACTIVATION)
    assert not found.selects(node="b", op="Gemm", tensor="t", role=Role.WEIGHT)
    scoped = rule(scope="If_0.*", set={"float": True})
    assert [scoped.selects(scope=name) for name in ("If_0.then_branch", "")] == [True, False]


def test_apply_names_the_rule_when_the_result_contradicts_itself():
    with pytest.raises(ConfigError, match=r"rule node=x -> granularity=block: .*block_size"):
        rule(node="x", set={"granularity": "block"}).apply(TensorConfig())


def test_describe_says_selectors_settings_and_place(tmp_path):
    text = "rules:\n  - node: [a, b]\n    between: [c, d]\n    set: {bits: 4}\n  - op: X\n    set: {float: true}\n"
    path = write(tmp_path, text)
    first, second = read_config(path).rules
    assert first.describe() == f"rule node=a|b between c and d -> bits=4 ({path}:2)"
    assert second.describe() == f"rule op=X -> float ({path}:5)"
    assert rule(op="Conv", set={"quantize": True, "bits": 8}).describe() == "rule op=Conv -> bits=8, quantize"


def test_a_range_is_of_activations_and_stands_in_the_file():
    assert rule(tensor="x", set={"range": [-1, 2.5]}).describe() == "rule tensor=x -> range=[-1.0, 2.5]"
    for settings in ({"range": [2, 1]}, {"range": [0, 1], "dynamic": True}):
        with pytest.raises(ConfigError, match=r"range is \[low, high\], of scales that stand in the file"):
            rule(tensor="x", set=settings)
    with pytest.raises(ConfigError, match="`range` is of activations"):
        rule(tensor="x", role="weight", set={"range": [0, 1]})


def test_nearest_ignores_case_and_gives_up_on_strangers():
    assert find_nearest("conv_12", ["Conv_1", "conv_2", "Relu"])[0] in ("Conv_1", "conv_2")
    assert find_nearest("zzz", ["Conv_1"]) == ()
    assert suggest_names("Cnov", ["Conv", "Relu"]) == "did you mean 'Conv'?"
    assert suggest_names("zzz", ["b", "a"]) == "known: a, b"
    assert suggest_names("zzz", []) == "there are none"
    names = [f"layer_{k:03d}" for k in range(400)]
    assert suggest_names("zzz", names) == f"known: {', '.join(names[:72])}, … (400 in all)"
    assert suggest_names("zzz", ["x" * 1000, "y"]) == f"known: {'x' * 1000}, … (2 in all)"


@pytest.mark.parametrize("command", list(Command))
def test_an_unknown_key_has_all_that_are_known(command):
    with pytest.raises(ConfigError) as caught:
        expand_names({"zzzz": 1}, command)
    known = {one.name for one in list_options(command)} | set(Config.model_fields)
    assert caught.value.fix == f"known: {', '.join(sorted(known))}"


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"bits": 4}, {"bits": 4, "storage": ""}),
        ({"scheme": "asymmetric"}, {"scheme": "asymmetric", "storage": ""}),
        ({"signed": False}, {"signed": False, "storage": ""}),
        ({"narrow_range": True}, {"narrow_range": True, "storage": "int8"}),
        ({"granularity": "channel"}, {"granularity": "channel", "block_size": None, "storage": "int8"}),
        ({"granularity": "block", "block_size": 8}, {"block_size": 8, "storage": "int8"}),
        ({"storage": "int16", "bits": 16}, {"storage": "int16", "bits": 16}),
        ({"observer": "mse"}, {"observer": ObserverSpec("mse"), "storage": "int8"}),
        ({"quantize": True}, {"bits": 8, "storage": "int8"}),
    ],
)
def test_a_rule_changes_what_it_names_and_what_follows_from_it(settings, found):
    wish = TensorConfig(granularity="block", block_size=32, storage="int8")
    made = rule(op="*", set=settings).apply(wish)
    assert {key: getattr(made, key) for key in found} == found


def test_patterns_of_one_selector_are_alternatives_and_a_missing_one_takes_all():
    found = rule(tensor=["a*", "/b$/"], set={"float": True})
    assert [found.selects(tensor=name) for name in ("ab", "xb", "ba")] == [True, True, False]
    assert found.selects(tensor="a", node="any", op="Any", role=Role.BIAS, scope="If_0")


def test_rules_in_python_may_be_values():
    made = Rule(op="Conv", set=RuleSet(bits=4))
    config = read_config(None, {"rules": [made, {"op": "Add", "set": {"float": True}}]})
    assert [one.op for one in config.rules] == [("Conv",), ("Add",)]
    assert config.rules[0].set == made.set


def test_an_observer_that_weights_do_not_have_is_for_the_activations_of_a_rule():
    weights, activations = TensorConfig(observer=ObserverSpec("mse")), TensorConfig()
    both = rule(op="Conv", set={"observer": "percentile", "bits": 4})
    assert both.apply(weights, Role.WEIGHT) == TensorConfig(bits=4, observer=ObserverSpec("mse"))
    assert both.apply(activations, Role.ACTIVATION).observer == ObserverSpec("percentile")
    assert rule(op="Conv", set={"observer": "minmax"}).apply(weights, Role.WEIGHT).observer == ObserverSpec()
