"""Values from arguments are validated as those of files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxq.config import check_number, load_config, set_options
from onnxq.errors import ConfigError


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 0, "8", True, None, [1]])
def test_numbers_of_callers(value: object) -> None:
    if value is None:
        check_number("budget", value, low=0, above=True)
        return
    with pytest.raises(ConfigError, match="budget: must be a finite number above 0"):
        check_number("budget", value, low=0, above=True)


def test_options_are_held_to_what_files_are(tmp_path: Path) -> None:
    config = load_config()
    for path, value, said in [
        ("data.samples", 0, "samples: must be greater than or equal to 1, not 0"),
        ("verify.threads", -1, "threads: must be greater than or equal to 0"),
        ("weight_bits_budget", float("nan"), "weight_bits_budget: must be a finite number"),
        ("effort", "fats", "did you mean 'fast'"),
    ]:
        with pytest.raises(ConfigError) as caught:
            set_options(config, {path: value})
        assert said in str(caught.value)
    assert set_options(config, {"data.samples": 3, "data.seed": None}).data.samples == 3
