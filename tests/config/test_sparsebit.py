"""Sparsebit's YAML means the same in our words, and what it cannot mean is refused with its line."""

from pathlib import Path

import pytest

from onnxq.config import MultiInput
from onnxq.errors import ConfigError
from onnxq.spec import ObserverSpec
from tests.config.kit import read

FULL = """BACKEND: virtual
SKIP_TRACE_MODULES: ["blocks.*.drop_path"]
SCHEDULE:
  FUSE_BN: True
  DISABLE_UNNECESSARY_QUANT: False
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER: {TYPE: LSQ, BIT: 4}
  OBSERVER: {TYPE: MSE}
  SPECIFIC: [{
    "stem_conv": ["QUANTIZER.BIT", 8],
    "head_*": ["QUANTIZER.DISABLE", True],
  }]
A:
  QSCHEME: per-tensor-affine
  QUANTIZER:
    TYPE: pact
    BIT: 4
    PACT: {ALPHA_VALUE: 6}
  OBSERVER:
    TYPE: PERCENTILE
    PERCENTILE: {ALPHA: 0.01}
    LAYOUT: NLC
  QADD: {ENABLE_QUANT: True}
  SPECIFIC: [{
    "lm_head": ["OBSERVER.TYPE", "ACIQ", "OBSERVER.ACIQ.DISTRIBUTION", "laplace"],
  }]
"""


def test_every_request_is_taken_over(tmp_path: Path) -> None:
    config = read(tmp_path, FULL)
    assert config.target == "virtual"
    weights, activations = config.weights, config.activations
    assert (weights.bits, weights.scheme, weights.granularity) == (4, "symmetric", "channel")
    assert weights.observer == ObserverSpec("mse")
    assert (activations.bits, activations.scheme, activations.granularity) == (4, "asymmetric", "tensor")
    assert activations.observer == ObserverSpec("percentile", (("percentile", 99.0),))
    assert config.torch.weights.quantizer.name == "lsq"
    assert config.torch.activations.quantizer.name == "pact"
    assert config.torch.activations.quantizer.options == (("alpha", 6),)
    assert (config.torch.fuse_bn, config.torch.disable_redundant) == (True, False)
    policy = config.torch.policy("add")
    assert policy is not None
    assert policy.policy == "insert"


def test_exceptions_become_rules_with_their_lines(tmp_path: Path) -> None:
    config = read(tmp_path, FULL)
    stem = next(rule for rule in config.rules if rule.set.bits == 8)
    assert stem.selects(node="stem.conv", role=stem.role[0])
    assert stem.selects(node="stem_conv", role=stem.role[0])
    assert not stem.selects(node="stem.conv2", role=stem.role[0])
    assert [role.value for role in stem.role] == ["weight"]
    assert f"{tmp_path}/c.yaml:11" in stem.describe()
    head = next(rule for rule in config.rules if rule.set.float)
    assert head.selects(node="head.tasks.0", role=head.role[0])
    aciq = next(rule for rule in config.rules if rule.set.observer)
    assert aciq.set.observer == ObserverSpec("aciq", (("distribution", "laplace"),))
    assert [role.value for role in aciq.role] == ["activation"]


def test_every_mapping_of_the_exceptions_counts_the_first_match_wins(tmp_path: Path) -> None:
    """A list of several mappings is the same as one mapping of all their patterns, each with its own line."""
    config = read(
        tmp_path,
        'W:\n  SPECIFIC:\n    - {"stem": ["QUANTIZER.BIT", 8]}\n    - {"head": ["QUANTIZER.BIT", 4],\n'
        '       "stem": ["QUANTIZER.BIT", 2]}\n',
    )
    assert [(rule.node, rule.set.bits, rule.line) for rule in config.rules] == [
        (("/^stem$/",), 8, 3),
        (("/^head$/",), 4, 4),
        (("/^stem$/",), 2, 5),
    ]


def test_defaults_are_sparsebits(tmp_path: Path) -> None:
    config = read(tmp_path, "BACKEND: tensorrt\nW: {QSCHEME: per-channel-symmetric, QUANTIZER: {BIT: 8}}\n"
                            "A: {QSCHEME: per-tensor-symmetric, QUANTIZER: {BIT: 8}}\n")  # fmt: skip
    assert (config.target, config.bias, config.torch.fuse_bn, config.torch.disable_redundant) == (
        "trt", "float", False, True,
    )  # fmt: skip
    policy = config.torch.policy("add")
    assert policy is not None
    assert policy.policy == "none"


@pytest.mark.parametrize("off", ["{BIT: 0}", "{BIT: 8, DISABLE: True}"])
def test_a_section_switched_off_stays_float(tmp_path: Path, off: str) -> None:
    config = read(tmp_path, f"W:\n  QUANTIZER: {off}\n")
    (rule,) = config.rules
    assert rule.set.float
    assert [role.value for role in rule.role] == ["weight"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("W:\n  QSCHEME: per-row-symmetric\n", ("c.yaml:2", "W.QSCHEME", "per-row-symmetric")),
        ("W:\n  QUANTISER: {BIT: 8}\n", ("c.yaml:2", "QUANTISER", "QUANTIZER")),
        ("A:\n  QUANTIZER: {TYPE: lsqq}\n", ("c.yaml:2", "lsqq", "lsq")),
        ("A:\n  QUANTIZER:\n    BITS: 8\n", ("c.yaml:3", "QUANTIZER.BITS", "QUANTIZER.BIT")),
        ("BACKEND: openvino\n", ("c.yaml:1", "openvino")),
        ("SCHEDULE:\n  BN_TUNING: True\n  FUSE_BN: True\n", ("c.yaml:2", "batchnorm_tuning")),
        ('W:\n  SPECIFIC: [{"a": ["QUANTIZER.BIT"]}]\n', ("c.yaml:2", "keys and values")),
        ('W:\n  SPECIFIC:\n    - {"a": ["QUANTIZER.BIT", 8]}\n    - {"b": 3}\n', ("c.yaml:4", "keys and values")),
        ('W:\n  SPECIFIC: [{"a": ["QUANTIZER.BIT", 8]}, 3]\n', ("c.yaml:2", "W.SPECIFIC[1]", "a mapping of patterns")),
        ('W:\n  SPECIFIC: {"a": ["QUANTIZER.BIT", 8]}\n', ("c.yaml:2", "list of mappings")),
        ("W: 3\n", ("c.yaml:1", "must be a mapping")),
    ],
)
def test_what_it_cannot_mean_is_refused_with_its_line(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(("text", "path", "value"), [
    ("BACKEND: OnnxRuntime", "target", "ort"),
    ("BACKEND: tensorrt\nA: {QSCHEME: per-tensor-symmetric}", "bias", "float"),
    ("A: {OBSERVER: {TYPE: KL_HISTOGRAM}}", "activations.observer", ObserverSpec("entropy")),
    ("A: {OBSERVER: {TYPE: MOVING_AVERAGE, MOVING_AVERAGE: {EMA_RATIO: 0.9}}}", "activations.observer",
     ObserverSpec("moving_average")),
    # Options of an observer that is not chosen are left out.
    ("A: {OBSERVER: {TYPE: MINMAX, PERCENTILE: {ALPHA: 0.01}}}", "activations.observer", ObserverSpec("minmax")),
    ('A: {OBSERVER: {TYPE: PERCENTILE, PERCENTILE: {ALPHA: "1e-3"}}}', "activations.observer",
     ObserverSpec("percentile", (("percentile", 99.9),))),
    ("W: {QUANTIZER: {TYPE: LSQ+}}", "torch.weights.quantizer.name", "lsq+"),
    ("W: {QUANTIZER: {TYPE: lsq, PACT: {ALPHA_VALUE: 3}}}", "torch.weights.quantizer.options", ()),
    ("W: {QUANTIZER: {BIT: null}}", "weights.bits", 8),
    ("SCHEDULE: {FUSE_BN: True}", "torch.fuse_bn", True),
    ("SKIP_TRACE_MODULES: [head]", "torch.skip_trace", ("/^head$/",)),
    ("SKIP_TRACE_MODULES: null", "torch.skip_trace", ()),
    ("A: {QADD: {ENABLE_QUANT: False}}", "torch.multi_input", (("add", MultiInput("none")),)),
])  # fmt: skip
def test_every_word_has_its_translation(tmp_path: Path, text: str, path: str, value: object) -> None:
    found: object = read(tmp_path, text)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("pattern", "selected", "not_selected"),
    [
        ("conv1", ["conv1"], ["conv10", "a.conv1"]),
        ("layer*_conv", ["layer1.conv", "layer1.0.conv", "layer_conv"], ["layer1.conv2"]),
        ("b?ock", ["block"], ["bock", "bloock"]),
        ("a+b", ["a+b"], ["aab"]),
    ],
)
def test_patterns_match_module_paths(
    tmp_path: Path, pattern: str, selected: list[str], not_selected: list[str]
) -> None:
    config = read(tmp_path, f'W: {{SPECIFIC: [{{"{pattern}": ["QUANTIZER.BIT", 4]}}]}}')
    (rule,) = config.rules
    assert [name for name in selected if not rule.selects(node=name, role=rule.role[0])] == []
    assert [name for name in not_selected if rule.selects(node=name, role=rule.role[0])] == []
