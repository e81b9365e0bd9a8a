"""The section `torch`: read, checked, carried through, and of no consequence to the engine."""

from __future__ import annotations

import pickle
from pathlib import Path

from onnxq.config import Config, FrontEnd, MultiInput, QuantizerSpec, load_config


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
