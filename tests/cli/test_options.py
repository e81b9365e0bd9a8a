"""Options of the command line, made from the configuration: what the function behind a command is given."""

import re
from collections.abc import Callable
from typing import Any, get_args

import click
import pytest

from onnxq.cli import cli
from onnxq.config import Command, Option, list_options
from onnxq.pipeline.configuration import make_config
from onnxq.report.terminal import TextView
from tests.cli.kit import CONTEXT, find_command, run

NAMES = "quantize plan apply diff prove profile bench variants perplexity report search convert import-weights"
COMMANDS = {name: Command[name.replace("-", "_").upper()] for name in NAMES.split()}
COMMANDS |= {"import-calibration": Command.IMPORT, "annotate-bits": Command.ANNOTATE, "calibrate": Command.QUANTIZE}
# Its arguments, for each command that has some.
ARGUMENTS = {
    **{name: ["m.onnx"] for name in cli.list_commands(CONTEXT)},
    "apply": ["m.onnx", "p.json"],
    "import-weights": ["m.onnx", "folder"],
    "diff": ["m.onnx", "q.onnx"],
    "compare": ["m.onnx", "q.onnx"],
    "build-kernels": [],
    "explain": ["Q303"],
}
# Options that a command must have beside any other.
REQUIRED = {
    "convert": {"--to": ["ort"]},
    "export-calibration": {"--format": ["aimet-2.0"]},
    "import-calibration": {"--model": ["m.onnx"]},
    "perplexity": {"--data": ["t.txt"]},
}
# A word and its value for options of plain types.
PLAIN: dict[object, tuple[list[str], object]] = {int: (["3"], 3), float: (["0.5"], 0.5), str: (["a"], "a")}
# Words that are their own value, by the path of the field, and by the name of an option that is no field.
WORDS = """
    target=trt accuracy.metric=a.py:f accuracy.max_drop=1% prove.engine=tensorrt report.engine=tensorrt
    prove.compute_capability=8.9 bench.engine=ort bench.compute_capability=8.9 variants.metric=a.py:f
    variants.max_drop=0.01 runtime.provider=cpu runtime.soc=SM8650 runtime.htp_arch=75 output.compiled=c.onnx
    search.precisions=float,w8a8
"""
OWN_WORDS = """
    data=s.npz out=out plan=p.json model=n.onnx applied=n.q.onnx kind=aimet-1.0 beside=n.json sidecar=n.json
    shard=2/8 record=p.html to=trt config=ort-int8-mse
"""


def read_words(words: str) -> dict[str, tuple[list[str], object]]:
    return {name: ([word], word) for name, _, word in (pair.partition("=") for pair in words.split())}


# The same for options of other types, and for values that mean more, by the path of the field.
GIVEN: dict[str, tuple[list[str], object]] = {
    **read_words(WORDS),
    "trust": (["my.yaml"], ("my.yaml",)),
    "budget": (["90s"], 90),
    "weight_bits_budget": (["8.5"], 8.5),
    "diff.engines": (["ort,trt"], ("ort", "trt")),
    "diff.load": (["r.json"], ("r.json",)),
    "prove.require": (["float16", "MatMul*"], (("float16", "MatMul*"),)),
    "prove.require_int8": (["Conv"], ("Conv",)),
    "prove.forbid": (["float32"], ("float32",)),
    "prove.shapes": (["x:1x3,2x3,4x3"], ("x:1x3,2x3,4x3",)),
    "prove.timeout": (["2m"], 120),
    "profile.by": (["site,node"], ("site", "node")),
    "bench.shapes": (["x:1x3"], ("x:1x3",)),
    "bench.seconds": (["5"], 5),
    "bench.timeout": (["5m"], 300),
    "variants.only": (["q8,q4"], ("q8", "q4")),
    "perplexity.generate": (["0"], 0),
    "data.memory_limit": (["512MB"], 512_000_000),
    "verify.holdout": (["0"], 0),
    "runtime.libraries": (["a.so"], ("a.so",)),
    "runtime.plugins": (["a.so"], ("a.so",)),
    "fix": (["batch=1"], ("batch=1",)),
    "prove.max_partitions": (["1"], 1),
    "search.max_size": (["2MB"], 2_000_000),
    "search.max_latency": (["2.5"], 2.5),
}
# The same for options that are no fields, by their names in the functions of commands.
OWN_GIVEN: dict[str, tuple[list[str], object]] = {
    **read_words(OWN_WORDS),
    "given": (["Conv*=4"], (("Conv*", 4),)),
    "archs": (["sm_90"], ("sm_90",)),
    "top": (["3"], 3),
    "fail_if": (["sqnr_db<30"], ("sqnr_db<30",)),
    "settings": (["weights.bits=4"], ("weights.bits", 4)),
}
# Options that mean something beside others alone.
BESIDE = {
    "emit": ["--config", "ort-int4-weights"],
    "emit qoperator": ["--config", "ort-int8"],
    "accuracy_level": ["--config", "ort-int4-weights", "--emit", "nbits"],
}
Given = dict[str, Any]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Given]:
    """The arguments of the function behind a command."""

    def run(name: str, *args: str) -> Given:
        seen: Given = {}
        command = find_command(name)
        monkeypatch.setattr(command, "callback", lambda **values: seen.update(values))
        command.invoke(command.make_context(name, list(args), parent=CONTEXT))
        return seen

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_options_of_the_configuration(name: str) -> None:
    there = {flag: param for param in find_command(name).params for flag in param.opts}
    for option in list_options(COMMANDS[name]):
        assert {there[flag].name for flag in option.flags} == {option.name}
    assert {"--config", "--set", "--json", "--quiet"} <= set(there)


def test_no_two_parameters_share_a_name() -> None:
    for name in cli.list_commands(CONTEXT):
        names = [param.name for param in find_command(name).params]
        assert len(names) == len(set(names)), name


def test_only_what_is_given_is_an_override(given: Callable[..., Given]) -> None:
    assert given("quantize", "m.onnx") == {
        "model": "m.onnx", "data": None, "config": None, "overrides": {}, "out": None, "force": False, "strict": False,
        "view": TextView(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "overrides"),
    [
        ("quantize m --ort-library a.so --ort-library b.so", {"ort_library": ("a.so", "b.so")}),
        ("quantize m --min-sqnr -1.5 --target mine", {"min_sqnr": -1.5, "target": "mine"}),
        ("quantize m --set weights.bits=4 --set skip=[a]", {"weights.bits": 4, "skip": ["a"]}),
        ("quantize m --seed 1 --set seed=2", {"seed": 2}),
        ("diff f q --engines ort,trt --layers --top-k 5", {"engines": ("ort", "trt"), "layers": True, "top_k": 5}),
        ("diff f q --load a --load b", {"load": ("a", "b")}),
    ],
)
def test_options_are_overrides_the_last_one_or_all(given: Callable[..., Given], line: str, overrides: Given) -> None:
    assert given(*line.split())["overrides"] == overrides


def give_value(option: Option) -> list[tuple[list[str], object]]:
    """Words for an option that is neither a flag nor a choice, and the value in its field."""
    kinds = (option.field.annotation, *get_args(option.field.annotation))
    return [GIVEN[option.path]] if option.path in GIVEN else [PLAIN[kind] for kind in kinds if kind in PLAIN]


def list_cases() -> list[tuple[str, Option | click.Option, str, list[str], object]]:
    """Every option of every command once by each of its flags, and by each of its choices: name of the command, option,
    flag, its words, and the value that they mean."""
    cases: list[tuple[str, Option | click.Option, str, list[str], object]] = []
    for name in cli.list_commands(CONTEXT):
        fields = {one.name: one for one in (list_options(COMMANDS[name]) if name in COMMANDS else ())}
        for param in find_command(name).params:
            if not isinstance(param, click.Option) or param.is_eager:
                continue
            option = fields.get(str(param.name), param)
            if param.is_flag:
                given: list[tuple[list[str], object]] = [
                    ([], not (isinstance(option, Option) and option.field.default))
                ]
            elif isinstance(param.type, click.Choice):
                given = [([str(one)], one) for one in param.type.choices]
            else:
                given = give_value(option) if isinstance(option, Option) else [OWN_GIVEN[str(param.name)]]
            cases += [(name, option, flag, *one) for flag in param.opts for one in given]
            # Its value where it stands alone.
            cases += [(name, option, flag, [], option.bare) for flag in param.opts if getattr(option, "bare", "")]
    return cases


CASES = list_cases()


@pytest.mark.parametrize(
    ("name", "option", "flag", "words", "value"), CASES, ids=[" ".join((one[0], one[2], *one[3])) for one in CASES]
)
def test_every_option_can_be_given(
    given: Callable[..., Given], name: str, option: Option | click.Option, flag: str, words: list[str], value: object
) -> None:
    needed = [word for other, rest in REQUIRED.get(name, {}).items() if other != flag for word in (other, *rest)]
    # In front of the arguments, but for one that may stand alone and would take them.
    behind = bool(getattr(option, "bare", ""))
    line = [*([] if behind else [flag, *words]), *ARGUMENTS[name], *needed, *([flag, *words] if behind else [])]
    if isinstance(option, Option):
        beside = BESIDE.get(" ".join((option.path, *words)), BESIDE.get(option.path, []))
        found = given(name, *line, *beside)
        config = make_config(found["config"], found["overrides"], COMMANDS[name])
        for part in option.path.split("."):
            config = getattr(config, part)
        assert config == value
    elif option.name == "settings":
        assert given(name, *line)["overrides"] == dict([value])
    else:
        found = given(name, *line)
        assert {**vars(found.get("view", TextView())), **found}[str(option.name)] == value


def test_every_option_has_a_case() -> None:
    """An option that is new wants a value in one of the tables above."""
    flags = {(name, flag) for name, _, flag, *_ in CASES}
    params = ((name, param) for name in cli.list_commands(CONTEXT) for param in find_command(name).params)
    there = {(name, flag) for name, param in params if isinstance(param, click.Option) for flag in param.opts}
    assert flags == there
    assert {option.path for _, option, *_ in CASES if isinstance(option, Option)} == {
        one.path for one in list_options()
    }
    own = {option.name for _, option, *_ in CASES if isinstance(option, click.Option)}
    assert (set(GIVEN) - {one.path for one in list_options()}, set(OWN_GIVEN) - own) == (set(), set())


def test_what_is_shown_is_one_value(given: Callable[..., Given]) -> None:
    assert given("plan", "m.onnx", "-v", "--top", "3", "-q")["view"] == TextView(verbose=True, top=3, quiet=True)
    assert given("build-kernels", "--json")["view"] == TextView(as_json=True)
    assert given("inspect", "m.onnx") == {"model": "m.onnx", "view": TextView()}


def test_bits_are_pairs_of_pattern_and_number(given: Callable[..., Given]) -> None:
    assert given("annotate-bits", "m", "--bits", "/a=b/=4", "--bits", "*=8")["given"] == (("/a=b/", 4), ("*", 8))


def test_the_help_names_options_where_the_library_names_parameters() -> None:
    texts = [
        param.help or "" for name in COMMANDS for param in find_command(name).params if isinstance(param, click.Option)
    ]
    assert "Fail if a weight can overflow 16-bit sums on CPUs without VNNI; `--engine ort` only." in texts
    assert [text for text in texts if "=…`" in text] == []


def test_help_lists_the_names_of_the_registry() -> None:
    shown = {name: run(name, "--help").stdout for name in ("quantize", "prove", "diff")}
    assert "--target [openvino|ort|qnn|trt|virtual|web]" in shown["quantize"]
    assert "--engine [tensorrt-rtx|tensorrt|openvino|ort|qnn|web]" in shown["prove"]
    assert "--engines openvino,ort,qnn,trt" in shown["diff"]


def test_help_lists_options_alone_and_says_what_each_flag_turns_off() -> None:
    for name in COMMANDS:
        shown = run(name, "--help").output
        assert re.findall(r"^  [A-Z]+ *$", shown, re.MULTILINE) == []
        flags = re.findall(r"^  --no-\S+ +(.*)", shown, re.MULTILINE)
        assert all(text.startswith("Do not ") for text in flags)
    assert "Do not time the float and the quantized model." in shown


def test_the_help_of_quantize_begins_with_what_people_need_first() -> None:
    shown = run("quantize", "--help").stdout
    titles = re.findall(r"^(\w[\w ]+):$", shown.partition("\nOptions:")[2], re.MULTILINE)
    assert titles[:3] == ["Quantization", "Accuracy", "Samples"]
    first = re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown.partition("\nOptions:")[2].partition("\n\n")[0], re.MULTILINE)
    assert {"--data", "--output", "--target", "--min-sqnr", "--report"} <= set(first)
    assert len({*first} - {"--help"}) <= 11
    every = [flag for param in find_command("quantize").params for flag in param.opts if flag.startswith("--")]
    assert all(shown.count(f" {flag} ") + shown.count(f" {flag},") + shown.count(f" {flag}\n") for flag in every)
