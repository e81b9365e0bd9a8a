"""Options of the command line, made from the configuration: what the function behind a command is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import onnx
import pytest
from click.testing import CliRunner

from onnxq.cli import cli
from onnxq.config import Command, list_options, load_config
from onnxq.report import View
from tests.pipeline.models import residual

COMMANDS = {
    "quantize": Command.QUANTIZE,
    "plan": Command.PLAN,
    "apply": Command.APPLY,
    "diff": Command.DIFF,
    "prove": Command.PROVE,
    "profile": Command.PROFILE,
    "import-calibration": Command.IMPORT,
    "annotate-bits": Command.ANNOTATE,
    "variants": Command.VARIANTS,
    "perplexity": Command.PERPLEXITY,
}
CONTEXT = click.Context(cli)
Given = dict[str, Any]


def find(name: str) -> click.Command:
    command = cli.get_command(CONTEXT, name)
    assert command is not None
    return command


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Given]:
    """The arguments of the function behind a command."""

    def run(name: str, *args: str) -> Given:
        seen: Given = {}
        command = find(name)
        monkeypatch.setattr(command, "callback", lambda **values: seen.update(values))
        command.invoke(command.make_context(name, list(args), parent=CONTEXT))
        return seen

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_options_of_the_configuration(name: str) -> None:
    there = {flag: param for param in find(name).params for flag in param.opts}
    for option in list_options(COMMANDS[name]):
        assert {there[flag].name for flag in option.flags} == {option.name}
    assert {"--config", "--set", "--json", "--quiet"} <= set(there)


def test_no_two_parameters_share_a_name() -> None:
    for name in cli.list_commands(CONTEXT):
        names = [param.name for param in find(name).params]
        assert len(names) == len(set(names)), name


def test_only_what_is_given_is_an_override(given: Callable[..., Given]) -> None:
    assert given("quantize", "m.onnx") == {
        "model": "m.onnx", "data": None, "config": None, "overrides": {}, "out": None, "force": False, "strict": False,
        "view": View(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "overrides"),
    [
        (["--no-latency"], {"latency": False}),
        (["--effort", "high", "--samples", "8"], {"effort": "high", "samples": 8}),
        (["--budget", "10m", "--memory-limit", "2GB"], {"budget": 600, "memory_limit": 2_000_000_000}),
        (["--ort-library", "a.so", "--ort-library", "b.so"], {"ort_library": ("a.so", "b.so")}),
        (["--emit-bits-attribute", "--external-data"], {"bits_attribute": True, "external_data": True}),
        (["--bits-attribute", "--plan", "p.json"], {"bits_attribute": True, "plan_out": "p.json"}),
        (["--min-sqnr", "-1.5"], {"min_sqnr": -1.5}),
        (["--metric", "a.py:f", "--max-drop", "1%"], {"metric": "a.py:f", "max_drop": "1%"}),
        (["--target", "mine"], {"target": "mine"}),
        (["--set", "weights.bits=4", "--set", "skip=[a]"], {"weights.bits": 4, "skip": ["a"]}),
        (["--seed", "1", "--set", "seed=2"], {"seed": 2}),
    ],
)
def test_options_of_quantize(given: Callable[..., Given], args: list[str], overrides: Given) -> None:
    assert given("quantize", "m.onnx", *args)["overrides"] == overrides


@pytest.mark.parametrize(
    ("name", "args", "overrides"),
    [
        ("diff", ["f", "q", "--engines", "ort,trt", "--layers", "--top-k", "5"],
         {"engines": ("ort", "trt"), "layers": True, "top_k": 5}),
        ("diff", ["f", "q", "--load", "a", "--load", "b"], {"load": ("a", "b")}),
        ("prove", ["m", "--engine", "ort", "--require-int8", "Conv", "--timeout", "2m", "--threads", "3"],
         {"engine": "ort", "require_int8": ("Conv",), "timeout": 120, "threads": 3}),
        ("profile", ["f", "--by", "site", "--samples", "2"], {"by": ("site",), "samples": 2}),
        ("apply", ["m", "p", "--new-weights"], {"new_weights": True}),
        ("annotate-bits", ["m", "--rename"], {"rename": True}),
        ("import-calibration", ["c", "--model", "m", "--allow-missing"], {"allow_missing": True}),
    ],
)  # fmt: skip
def test_options_of_other_commands(given: Callable[..., Given], name: str, args: list[str], overrides: Given) -> None:
    assert given(name, *args)["overrides"] == overrides


@pytest.mark.parametrize("flag", ["--save", "-o", "--output"])
@pytest.mark.parametrize("name", ["diff", "prove"])
def test_a_folder_for_results_goes_by_three_names(given: Callable[..., Given], name: str, flag: str) -> None:
    models = ["f", "q"] if name == "diff" else ["q"]
    assert given(name, *models, flag, "folder")["out"] == "folder"


def test_what_is_shown_is_one_value(given: Callable[..., Given]) -> None:
    view = given("plan", "m.onnx", "-v", "--top", "3", "-q")["view"]
    assert view == View(verbose=True, top=3, quiet=True)
    assert given("build-kernels", "--json")["view"] == View(as_json=True)
    assert given("inspect", "m.onnx") == {"model": "m.onnx", "view": View()}


def test_bits_are_pairs_of_pattern_and_number(given: Callable[..., Given]) -> None:
    assert given("annotate-bits", "m", "--bits", "/a=b/=4", "--bits", "*=8")["given"] == (("/a=b/", 4), ("*", 8))


def test_the_help_names_options_where_the_library_names_parameters() -> None:
    texts = [param.help or "" for name in COMMANDS for param in find(name).params if isinstance(param, click.Option)]
    assert "No weight may overflow 16-bit sums on CPUs without VNNI; `--engine ort` only." in texts
    assert [text for text in texts if "=…`" in text] == []


@pytest.mark.parametrize(("text", "wanted"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("0.5 m", 30)])
def test_times(text: str, wanted: float) -> None:
    assert load_config(None, {"budget": text}).budget == wanted


@pytest.mark.parametrize("text", ["0", "ten", "-1s", "5d"])
def test_times_that_are_none(text: str, tmp_path: Path) -> None:
    onnx.save(residual(), tmp_path / "m.onnx")
    done = CliRunner().invoke(cli, ["quantize", str(tmp_path / "m.onnx"), "--budget", text])
    assert done.exit_code == 2
