"""The library names its parameters (`force=True`); here they become options (`--force`)."""

from __future__ import annotations

import re

# Parameters of the public functions that messages name, with the option that gives each.
OPTIONS = {
    "allow_missing": "--allow-missing",
    "batch": "--batch",
    "budget": "--budget",
    "cpu": "--cpu",
    "data": "--data",
    "engine": "--engine",
    "engines": "--engines",
    "force": "--force",
    "given": "--bits",
    "load": "--load",
    "max_drop": "--max-drop",
    "memory_limit": "--memory-limit",
    "metric": "--metric",
    "min_sqnr": "--min-sqnr",
    "new_weights": "--new-weights",
    "out": "--output",
    "overwrite": "--force",
    "placement": "--placement",
    "plan_out": "--plan",
    "promote_to": "--promote-to",
    "reduce": "--reduce",
    "require_exact": "--require-exact",
    "require_int8": "--require-int8",
    "samples": "--samples",
    "save": "--save",
    "shapes": "--shapes",
    "target": "--target",
    "top": "--top",
    "verbose": "-v",
}
_PARAMETER = re.compile(r"`(\w+)=([^`]*)`")


def name_options(text: str) -> str:
    """The text with options in the place of parameters: `force=True` -> `--force`, `cpu='vnni'` -> `--cpu vnni`."""
    return _PARAMETER.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    option, value = OPTIONS.get(found[1]), found[2]
    if option is None:
        return found[0]
    return f"`{option}`" if value in ("True", "…") else f"`{option} {value.strip(chr(39))}`"
