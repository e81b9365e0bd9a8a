"""The presets: YAML files in `configs/` of a checkout or in the package that a wheel installs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from onnxq.errors import ConfigError
from onnxq.nearest import suggest_names

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_PACKAGE = "onnxq_configs"
# Where nothing is said. Presets are named after their target.
DEFAULT_PRESET = "ort-int8"
DEFAULT_TARGET = DEFAULT_PRESET.partition("-")[0]


class UnreadableConfigError(ConfigError):
    """No preset and no file can be read under a name; the fault lies with the text that names it."""


def _find_folder() -> Traversable:
    # The checkout comes first: an editable install may not map the data-only package.
    beside = Path(__file__).resolve().parents[2] / "configs"
    if (beside / f"{DEFAULT_PRESET}.yaml").is_file():
        return beside
    try:
        return resources.files(_PACKAGE)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "presets", f"neither {beside} nor the package {_PACKAGE} is there", "reinstall onnxq", code="Q301"
        ) from error


def list_presets() -> tuple[str, ...]:
    """List the names of all presets, sorted."""
    return tuple(sorted(f.name.removesuffix(".yaml") for f in _find_folder().iterdir() if f.name.endswith(".yaml")))


def read_preset(name: str) -> str:
    """Read the YAML of a preset. Raises ConfigError with the nearest names if there is none."""
    if name not in list_presets():
        raise UnreadableConfigError(
            f"preset {name!r}", "no preset or file of this name", suggest_names(name, list_presets()), code="Q301"
        )
    return (_find_folder() / f"{name}.yaml").read_text(encoding="utf-8")
