"""Rules: which names they select, what they make of a wish, how they are called in messages."""

import pytest

from onnxq.config import Config, Rule, RuleSet, TensorConfig, load_config
from onnxq.errors import ConfigError
from onnxq.nearest import find_nearest, suggest_names
from onnxq.sites import Role
from onnxq.spec import ObserverSpec


def rule(**raw) -> Rule:
    return load_config(None, {"rules": [raw]}).rules[0]


def test_all_selectors_given_must_hold():
    found = rule(node="a*", op=["Conv", "Gemm"], role="weight", set={"bits": 4})
    assert found.selects(node="ab", op="Gemm", tensor="t", role=Role.WEIGHT)
    assert not found.selects(node="ab", op="MatMul", tensor="t", role=Role.WEIGHT)
    assert not found.selects(node="ab", op="Gemm", tensor="t", role=Role.ACTIVATION)
    assert not found.selects(node="b", op="Gemm", tensor="t", role=Role.WEIGHT)


def test_scope_selector():
    found = rule(scope="If_0.*", set={"float": True})
    assert found.selects(scope="If_0.then_branch")
    assert not found.selects(scope="")


def test_apply_sets_what_is_given_and_leaves_the_rest():
    default = load_config().activations
    made = rule(op="Conv", set={"observer": {"name": "percentile", "percentile": 99.9}}).apply(default)
    assert made == default.model_copy(update={"observer": ObserverSpec("percentile", (("percentile", 99.9),))})


def test_apply_lets_go_of_what_no_longer_fits():
    int4 = load_config("ort-int4-weights").weights
    made = rule(node="x", set={"granularity": "channel", "bits": 8}).apply(int4)
    assert (made.bits, made.granularity, made.block_size, made.storage) == (8, "channel", None, "")


def test_apply_names_the_rule_when_the_result_contradicts_itself():
    with pytest.raises(ConfigError, match=r"rule node=x -> granularity=block: .*block_size"):
        rule(node="x", set={"granularity": "block"}).apply(TensorConfig())


def test_describe_says_selectors_settings_and_place(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "rules:\n  - node: [a, b]\n    between: [c, d]\n    set: {bits: 4}\n  - op: X\n    set: {float: true}\n"
    )
    first, second = load_config(path).rules
    assert first.describe() == f"rule node=a|b between c and d -> bits=4 ({path}:2)"
    assert second.describe() == f"rule op=X -> float ({path}:5)"
    assert rule(op="Conv", set={"quantize": True, "bits": 8}).describe() == "rule op=Conv -> bits=8, quantize"


def test_python_rules_need_no_line():
    config = Config(rules=(Rule(op=("Conv",), set=RuleSet(float=True)),))
    assert config.rules[0].describe() == "rule op=Conv -> float"


def test_nearest_ignores_case_and_gives_up_on_strangers():
    assert find_nearest("conv_12", ["Conv_1", "conv_2", "Relu"])[0] in ("Conv_1", "conv_2")
    assert find_nearest("zzz", ["Conv_1"]) == ()
    assert suggest_names("Cnov", ["Conv", "Relu"]) == "did you mean 'Conv'?"
    assert suggest_names("zzz", ["b", "a"]) == "known: a, b"
    assert suggest_names("zzz", []) == "there are none"
    assert "(20 in all)" in suggest_names("zzz", [str(k) for k in range(20)])
