"""Sections on data."""

from pathlib import Path

from onnxq.config import load_config


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_images_square_size_and_defaults(tmp_path):
    images = load_config(write(tmp_path, "data:\n  images: {size: 224, mean: [0.5], std: [0.2]}\n")).data.images
    assert images is not None
    assert (images.size, images.range, images.mean, images.crop) == ((224, 224), (0.0, 1.0), (0.5,), "center")
