"""Code that a file names is run only where the file is trusted, or where the caller names the code, too."""

from pathlib import Path

import pytest

from onnxq.cli.options import name_options
from onnxq.config import Config, check_trust, list_code, read_config
from onnxq.errors import ConfigError
from tests.config.kit import read, write

ASKING = {
    "runtime.libraries": "runtime: {libraries: ops.so}",
    "runtime.plugins": "runtime:\n  plugins: [ops.so]",
    "accuracy.metric": "accuracy: {metric: 'evaluate.py:score'}",
    "variants.metric": "variants: {metric: 'evaluate.py:score'}",
    # Objects come from there pickled, and unpickling runs code.
    "scale.dask": "scale: {dask: 'tcp://somewhere:8786'}",
}


def refuse(config: Config, overrides: dict[str, object] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_trust(config, overrides or {})
    assert caught.value.code == "Q324"
    return caught.value


@pytest.mark.parametrize("path", ASKING)
def test_a_file_that_names_code_wants_trust_or_the_same_from_the_caller(tmp_path: Path, path: str) -> None:
    file = write(tmp_path, f"target: ort\n{ASKING[path]}\n", "my.yaml")
    config = read_config(file)
    ((_, code),) = list_code(config)
    error = refuse(config)
    assert (error.file, error.line) == (str(file), 3 if "\n" in ASKING[path] else 2)
    assert path in error.subject
    assert code in error.cause
    assert f"--trust {file}" in name_options(error.fix)
    assert code in error.fix
    given = [code] if path.startswith("runtime") else code
    check_trust(read_config(config, {path: given}), {path: given})
    section, key = path.split(".")
    check_trust(read_config(config, {section: {key: given}}), {section: {key: given}})
    check_trust(read_config(file, {"trust": str(file)}), {})
    check_trust(read_config(file, {"trust": [str(tmp_path / ".." / tmp_path.name / "my.yaml")]}), {})
    refuse(read_config(file, {"trust": str(tmp_path / "other.yaml")}))


def test_another_value_of_the_caller_leaves_nothing_to_trust_but_lists_are_joined(tmp_path: Path) -> None:
    file = write(tmp_path, "accuracy: {metric: 'a.py:f'}\n")
    check_trust(read_config(file, {"accuracy.metric": "b.py:f"}), {"accuracy.metric": "b.py:f"})
    write(tmp_path, "runtime: {libraries: a.so}\n")
    given = {"runtime.libraries": ["b.so"]}
    assert "a.so" in refuse(read_config(file, given), given).cause


def test_the_file_that_names_the_code_is_the_one_to_trust(tmp_path: Path) -> None:
    base = write(tmp_path, "runtime: {libraries: [a.so, b.so]}\n", "base.yaml")
    file = write(tmp_path, "extends: base.yaml\nruntime: {libraries: c.so}\n")
    assert refuse(read_config(file)).file == str(file)
    assert refuse(read_config(file, {"trust": str(file)})).file == str(base)
    check_trust(read_config(file, {"trust": [str(file), str(base)]}), {})


def test_no_file_trusts_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml:1: trust: unknown key 'trust'"):
        read(tmp_path, f"trust: [{tmp_path / 'my.yaml'}]\n", "my.yaml")


def test_what_python_gives_needs_none() -> None:
    check_trust(read_config(None, {"runtime": {"libraries": ["a.so"]}, "accuracy": {"metric": len}}), {})
    check_trust(read_config("trt-int8"), {})
    check_trust(Config(), {})
