"""The presets: YAML files in `configs/`, found beside a checkout and inside an installed wheel alike."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from onnxq.errors import ConfigError
from onnxq.nearest import did_you_mean

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_PACKAGE = "onnxq_configs"


def _folder() -> Traversable:
    # The checkout comes first: an editable install may not map the data-only package.
    beside = Path(__file__).resolve().parents[2] / "configs"
    if (beside / "ort-int8.yaml").is_file():
        return beside
    try:
        return resources.files(_PACKAGE)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "presets", f"neither {beside} nor the package {_PACKAGE} is there", "reinstall onnxq", code="Q301"
        ) from error


def preset_names() -> tuple[str, ...]:
    """Every preset by name, sorted."""
    return tuple(sorted(f.name.removesuffix(".yaml") for f in _folder().iterdir() if f.name.endswith(".yaml")))


def preset_text(name: str) -> str:
    """The YAML of a preset; ConfigError with the nearest names when there is none."""
    if name not in preset_names():
        raise ConfigError(
            f"preset {name!r}", "no preset or file of this name", did_you_mean(name, preset_names()), code="Q301"
        )
    return (_folder() / f"{name}.yaml").read_text(encoding="utf-8")
