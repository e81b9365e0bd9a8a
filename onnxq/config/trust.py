"""Code that files name: libraries, functions, schedulers. A file from elsewhere runs none by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from onnxq.config.load import nest_keys
from onnxq.config.model import Config
from onnxq.config.options import list_code
from onnxq.errors import ConfigError


def check_trust(config: Config, overrides: Mapping[str, Any]) -> None:
    """Raise ConfigError if a file that is not trusted names code which `overrides`, of the caller, do not name."""
    trusted = {os.path.realpath(file) for file in config.trust}
    own = [(option.path, code) for option, code in list_code(nest_keys(overrides))]
    for option, code in list_code(config):
        place = config.find_code(option.path, code)
        if place is None or (option.path, code) in own or os.path.realpath(place.file) in trusted:
            continue
        cause = f"names code that would be run, {code!r}, and the file is not trusted"
        fix = f"look at it; then name it yourself, `{option.name}={code!r}`, or trust the file, `trust={place.file!r}`"
        raise ConfigError(place / option.path, cause, fix, code="Q324")
