"""The section `torch`: read, checked, carried through, and of no consequence to the engine."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from onnxq.config import Config, FrontEnd, MultiInput, QuantizerSpec, load_config
from onnxq.errors import ConfigError


def read(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return load_config(path)


FULL = """
target: virtual
torch:
  weights: {quantizer: lsq}
  activations:
    quantizer: {name: pact, alpha: 8.0, signed: true}
  skip_trace: [head, "blocks.*"]
  multi_input: {cat: share, add: insert, mul: {follow: 1}, sub: follow, matmul: none}
  fuse_bn: false
  disable_redundant: false
rules:
  - node: stem
    set: {quantizer: uniform}
  - node: fc
    set: {bits: 8, quantizer: {name: lsq, symmetric_init: true}}
"""


def test_every_key_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, FULL)
    front = config.torch
    assert front.weights.quantizer == QuantizerSpec("lsq")
    assert front.activations.quantizer == QuantizerSpec("pact", (("alpha", 8.0), ("signed", True)))
    assert front.skip_trace == ("head", "blocks.*")
    assert front.policy("mul") == MultiInput("follow", 1)
    assert front.policy("sub") == MultiInput("follow", 0)
    assert [front.policy(op).policy for op in ("cat", "add", "matmul")] == ["share", "insert", "none"]
    assert front.policy("div") is None
    assert not front.fuse_bn
    assert not front.disable_redundant
    assert config.rules[0].set.quantizer == QuantizerSpec("uniform")
    assert config.rules[1].set.quantizer == QuantizerSpec("lsq", (("symmetric_init", True),))
    assert "quantizer=uniform" in config.rules[0].describe()


def test_it_survives_overrides_pickling_and_hashing(tmp_path: Path) -> None:
    config = read(tmp_path, FULL)
    for other in (load_config(config, {"data.samples": 3}), pickle.loads(pickle.dumps(config))):
        assert (other.torch, other.rules) == (config.torch, config.rules)
    assert isinstance(hash(config), int)
    assert load_config(config, {"torch.fuse_bn": True}).torch.fuse_bn


def test_without_it_nothing_is_asked() -> None:
    assert load_config("ort-int8").torch == FrontEnd()


def test_a_quantizer_is_not_mixed_with_an_inherited_ones_options(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("torch: {activations: {quantizer: {name: pact, alpha: 8.0}}}\n")
    config = read(tmp_path, "extends: base.yaml\ntorch: {activations: {quantizer: {name: lsq}}}\n")
    assert config.torch.activations.quantizer == QuantizerSpec("lsq")


@pytest.mark.parametrize(
    ("text", "line", "path", "hint"),
    [
        ("torch:\n  weigths: {}", 2, "torch.weigths", "weights"),
        ("torch:\n  weights: {quantiser: lsq}", 2, "torch.weights.quantiser", "quantizer"),
        ("torch:\n  weights:\n    quantizer: {alpha: 2}", 3, "torch.weights.quantizer", "a mapping with `name`"),
        ("torch:\n  weights:\n    quantizer: {name: lsq, levels: [1]}", 3, "torch.weights.quantizer", "'levels'"),
        ("torch:\n  multi_input: {add: insrt}", 2, "torch.multi_input", "insert, share, none"),
        ("torch:\n  multi_input: {add: {follow: -1}}", 2, "torch.multi_input", "'add' must be"),
        ("torch:\n  multi_input: share", 2, "torch.multi_input", "must map operators"),
        ("torch:\n  skip_trace: ['']", 2, "torch.skip_trace", "must not be empty"),
        ("torch:\n  skip_trace: ['/(/']", 2, "torch.skip_trace", "regular expression"),
        ("torch:\n  fuse_bn: 1", 2, "torch.fuse_bn", "boolean"),
        ("rules:\n  - node: x\n    set: {quantizer: 3}", 3, "rules[0].set.quantizer", "a mapping with `name`"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_line(
    tmp_path: Path, text: str, line: int, path: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert f"own.yaml:{line}: {path}" in str(error.value)
    assert hint in str(error.value)
