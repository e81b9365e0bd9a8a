"""Configurations in files."""

from pathlib import Path

from onnxq.config import Config, read_config


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str, name: str = "c.yaml") -> Config:
    """The configuration of a file with this text."""
    return read_config(write(folder, text, name))
