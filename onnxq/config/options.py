"""Values from arguments of Python calls, validated as strictly as those of files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from onnxq.config.faults import list_faults, shorten_value
from onnxq.config.model import Config
from onnxq.config.values import Frozen
from onnxq.errors import ConfigError


def set_options(config: Config, asked: Mapping[str, Any]) -> Config:
    """Set values by dotted path ("data.samples"); None keeps the present value.

    Raises ConfigError naming the argument ("samples") for a value that would be wrong in a file, too.
    """
    update: dict[str, Any] = {}
    for path, value in asked.items():
        if value is None:
            continue
        name, _, inner = path.partition(".")
        section = update.get(name, getattr(config, name)) if inner else config
        # Strict validation accepts Python's numbers only, not numpy's scalars.
        plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
        checked = _check_field(type(section), inner or name, plain)
        update[name] = section.model_copy(update={inner: checked}) if inner else checked
    return config.model_copy(update=update) if update else config


def _check_field(section: type[Frozen], name: str, value: Any) -> Any:
    try:
        return getattr(section.model_validate({name: value}, strict=True), name)
    except ValidationError as error:
        fault = list_faults(error, section)[0]
        raise ConfigError(name, fault.cause, fault.fix or "give another value", code="Q304") from error


def check_number(
    name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, whole: bool = False, above: bool = False
) -> None:
    """Raise ConfigError unless the argument is None or a finite number in [low, high]. above: low is excluded."""
    if value is None:
        return
    try:
        found = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    fits = math.isfinite(found) and low <= found <= high and not (above and found == low)
    if not fits or (whole and found != math.floor(found)):
        ends = f" above {low:g}" if above else f" of at least {low:g}" if low > -math.inf else ""
        ends = f" from {low:g} to {high:g}" if high < math.inf else ends
        kind = "a whole number" if whole else "a finite number"
        raise ConfigError(name, f"must be {kind}{ends}, not {shorten_value(value)}", "give another value", code="Q304")
