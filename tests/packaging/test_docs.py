"""Everything that the documents promise is there."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

import onnxq
from onnxq.backends import find_target
from onnxq.cli import cli
from onnxq.config import Config, ImageConfig, RuleSet, list_presets
from onnxq.config.document import list_models
from onnxq.passes.registry import SKIPPABLE

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = sorted(
    {
        re.split(r"[<>=!\[; ]", requirement)[0]
        for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
        for requirement in group
    }
    - {"onnxq"}
)
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(p for f in ("docs", "examples", "benchmarks", "cuda") for p in (ROOT / f).rglob("*.md"))]
)


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_dependency_says_why_it_is_here(name: str) -> None:
    lines = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(f"| `{name}`")], f"no line for {name}"


def test_the_two_engines_never_meet() -> None:
    for name, group in PROJECT["optional-dependencies"].items():
        engines = [r for r in group if re.match(r"onnxruntime\b", r) or re.search(r"\[.*\b(cpu|gpu)\b.*\]", r)]
        assert len(engines) <= 1, name


def test_links_inside_the_documents_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert broken == []


def test_the_changelog_knows_this_version() -> None:
    assert f"## {onnxq.__version__} – " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_readme_starts_with_the_two_commands() -> None:
    first = re.search(r"```\w*\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make demo", "make test"]


CONTEXT = click.Context(cli, **cli.context_settings)
COMMANDS = cli.list_commands(CONTEXT)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_is_documented(name: str) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    command = cli.get_command(CONTEXT, name)
    assert f"`onnxq {name} " in text
    options = [flag for option in command.params if isinstance(option, click.Option) for flag in option.opts]
    assert [flag for flag in options if not re.search(rf"`{re.escape(flag)}\b", text)] == []


def test_no_option_is_documented_that_is_not_there() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    known = {"--help"}
    for name in COMMANDS:
        known |= {flag for option in cli.get_command(CONTEXT, name).params for flag in option.opts}
    assert set(re.findall(r"--[a-z][a-z0-9-]+", text)) - known == set()


@pytest.mark.parametrize(
    "model",
    [
        Config,
        ImageConfig,
        RuleSet,
        *(one for field in Config.model_fields.values() for one in list_models(field.annotation)),
    ],
)
def test_every_configuration_key_is_documented(model: type[BaseModel]) -> None:
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    filled_in_by_the_reader = {"source", "line"}
    assert set(model.model_fields) - filled_in_by_the_reader - set(re.findall(r"[a-z_0-9]+", text)) == set()


def test_every_preset_is_documented() -> None:
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert [name for name in list_presets() if f"| `{name}` |" not in text] == []


def test_the_install_lines_of_the_readme_name_a_checkout_and_extras_that_are_there() -> None:
    """Whether they install is the business of test_wheel.py: the wheel is made as pip makes it of `.`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if "pip install" in line]
    assert len(lines) >= 2
    for line in lines:
        _, _, what = shlex.split(line, comments=True)
        found = re.fullmatch(r"\.\[(.+)\]", what)
        assert found is not None, f"not published: {line}"
        assert set(found[1].split(",")) <= set(PROJECT["optional-dependencies"])
    for extras in re.findall(r"pip install [^`\n]*\[([\w,-]+)\]", text):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def _list_command_lines() -> Iterator[tuple[str, str]]:
    """Each command of ours in a block of a document, with the document's name; optional parts `[…]` are taken."""
    for path in DOCUMENTS:
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().startswith("onnxq "):
                    yield path.name, re.sub(r"[\[\]]", "", line.strip())


def test_the_commands_of_the_documents_are_understood() -> None:
    lines = list(_list_command_lines())
    assert {"README.md", "scale.md", "variants.md", "from-modelopt.md"} <= {name for name, _ in lines}
    for _, line in lines:
        _, name, *arguments = shlex.split(line, comments=True)
        command = cli.get_command(CONTEXT, name)
        assert command is not None, line
        command.make_context(name, arguments, parent=CONTEXT)  # raises UsageError for what is not there


def test_commands_in_the_text_of_documents_have_the_options_that_are_named() -> None:
    spans = [span for path in DOCUMENTS for span in re.findall(r"`onnxq ([^`]+)`", path.read_text(encoding="utf-8"))]
    assert len(spans) > 50
    lost = []
    for span in spans:
        name, *words = span.split()
        command = cli.get_command(CONTEXT, name) if name.islower() else cli
        flags = {flag for param in command.params for flag in param.opts} if command is not None else set()
        named = {word.strip("[],…").partition("=")[0] for word in words if word.startswith(("-", "[-"))}
        lost += [span] if command is None or named - flags - {"--help"} else []
    assert lost == []


@pytest.mark.parametrize("name", ["ort", "trt", "qnn", "openvino"])
def test_every_placement_rule_is_documented(name: str) -> None:
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    part = text.split("\n## ")[{"ort": 1, "trt": 2, "qnn": 3, "openvino": 4}[name]]
    rules = find_target(name).rules
    assert [rule.name for rule in rules if f"`{rule.name}`" not in part.split("###")[0]] == []
    named = set(re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", part, re.MULTILINE))
    assert {one.strip("`") for row in named for one in row.split(", ")} - {rule.name for rule in rules} == set()


def test_the_tests_that_documents_name_are_there() -> None:
    named = {
        (path, test)
        for document in DOCUMENTS
        for path, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", document.read_text(encoding="utf-8"))
    }
    assert named
    lost = [
        f"{path}::{test}"
        for path, test in sorted(named)
        if not (ROOT / path).is_file() or f"def {test}" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert lost == []


def test_every_pass_stands_in_the_table_of_the_accuracy_page() -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    table = text[text.index("| pass |") : text.index("\n\n", text.index("| pass |"))]
    named = {name for names in re.findall(r"`skip: \[([\w, -]+)\]`", table) for name in names.split(", ")}
    assert named == SKIPPABLE


def test_the_contract_of_passes_on_the_architecture_page_is_the_code() -> None:
    code = "".join(
        (ROOT / "onnxq" / "passes" / name).read_text(encoding="utf-8")
        for name in ("base.py", "state.py", "judging.py", "journal.py")
    )
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("<!-- pass contract: begin -->")[2]
    blocks = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    assert len(blocks) == 7
    assert [block for block in blocks if block not in code] == []
