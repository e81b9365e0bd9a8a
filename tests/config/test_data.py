"""Sections on data, runs, checks and outputs: what is read, and what cannot be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxq.config import Config, DataConfig, ImageConfig, RuntimeConfig, VerifyConfig, load_config
from onnxq.config.data import OutputConfig


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read_images(**values: Any) -> ImageConfig:
    images = load_config(None, {"data.images": {"size": 4, **values}}).data.images
    assert images is not None
    return images


def test_images_square_size_and_defaults(tmp_path: Path) -> None:
    images = load_config(write(tmp_path, "data:\n  images: {size: 224, mean: [0.5], std: [0.2]}\n")).data.images
    assert images is not None
    assert (images.size, images.range, images.mean, images.crop) == ((224, 224), (0.0, 1.0), (0.5,), "center")


@pytest.mark.parametrize(
    ("given", "field", "found"),
    [
        ({"size": [32, 64]}, "size", (32, 64)),
        ({"resize": 40}, "resize", 40),
        ({"crop": "pad", "fill": 114}, "fill", 114),
        ({"color": "GRAY", "mean": [0.1], "std": [0.3]}, "std", (0.3,)),
        ({"color": "BGR", "mean": [1, 2, 3]}, "mean", (1.0, 2.0, 3.0)),
        ({"range": [-1, 1]}, "range", (-1.0, 1.0)),
        ({"layout": "NHWC", "interpolation": "lanczos"}, "layout", "NHWC"),
        ({"input": "pixels"}, "input", "pixels"),
    ],
)
def test_every_key_of_images(given: dict[str, Any], field: str, found: object) -> None:
    assert getattr(read_images(**given), field) == found


def test_sections_have_the_documented_defaults() -> None:
    config = Config()
    assert config.data == DataConfig(images=None, samples=None, seed=0, batch=None, memory_limit=None)
    assert config.verify == VerifyConfig(holdout=None, latency=True, threads=1)
    assert config.runtime == RuntimeConfig(libraries=())
    assert config.output == OutputConfig(plan="", bits_attribute=False, external_data=False, rename=False)


@pytest.mark.parametrize(
    ("text", "field", "found"),
    [
        ("data: {samples: 64, seed: 3, batch: 8}", "data", DataConfig(samples=64, seed=3, batch=8)),
        ("data: {memory_limit: 1.5GiB}", "data", DataConfig(memory_limit=3 * 2**29)),
        ("data: {memory_limit: 4096}", "data", DataConfig(memory_limit=4096)),
        ("verify: {holdout: 0, latency: no, threads: 0}", "verify", VerifyConfig(holdout=0, latency=False, threads=0)),
        ("output: {plan: p.json, rename: yes}", "output", OutputConfig(plan="p.json", rename=True)),
    ],
)
def test_sections_are_read(tmp_path: Path, text: str, field: str, found: object) -> None:
    assert getattr(load_config(write(tmp_path, text)), field) == found


def test_libraries_of_a_chain_of_files_come_together(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    write(tmp_path / "ops", "runtime: {libraries: base.so}", "base.yaml")
    top = write(tmp_path, "extends: ops/base.yaml\nruntime: {libraries: [top.so, /abs.so]}")
    found = load_config(top, {"runtime.libraries": "more.so"}).runtime.libraries
    assert found == ("more.so", str(tmp_path / "top.so"), "/abs.so", str(tmp_path / "ops" / "base.so"))
