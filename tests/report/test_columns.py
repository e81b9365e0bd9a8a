"""Tables and text at 80 columns: names lose their middle, never break; a pipe gets all; `--top` says what it hides."""

import io
import re
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from rich.cells import cell_len
from rich.text import Text

import onnxq
from onnxq.commands.results import show
from onnxq.engines.diff.model import OFF, ON, Difference, Error, LayerDiff, OutputDiff, Run
from onnxq.evaluation.sensitivity import GroupCost, PrefixError, Profile
from onnxq.report.columns import fit_words, shorten_name
from onnxq.report.terminal import MORE, TextView, make_table, print_renderable, select_rows
from tests.processes import build_here

LAYERS, WIDTH = 6, 80
PREFIX = "/model/decoder/language_model/layers"


def names(kind: str) -> list[str]:
    """As PyTorch's exporters make them."""
    return [f"{PREFIX}.{k}/self_attn/q_proj/{kind}" for k in range(LAYERS)]


Made = dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """By command, what it found out of matrix products with long names."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("columns")
    tensors = ["x", *names("MatMul_output_0")[:-1], "y"]
    steps = zip(names("MatMul"), tensors, tensors[1:], strict=False)
    nodes = [helper.make_node("MatMul", [read, f"{node}.weight"], [made], name=node) for node, read, made in steps]
    weights = {f"{node}.weight": (rng.standard_normal((64, 64)) / 8).astype(np.float32) for node in names("MatMul")}
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    ends = [helper.make_tensor_value_info(name, 1, [8, 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), folder / "m.onnx")
    (folder / "c.yaml").write_text("rules:\n  - {op: MatMul, set: {quantize: true}}\n")
    data = {"x": rng.standard_normal((4, 8, 64)).astype(np.float32)}
    np.savez(folder / "d.npz", **data)
    target = folder / "m.q.onnx"
    onnxq.quantize(
        folder / "m.onnx", data, folder / "c.yaml", overrides={"effort": "fast", "latency": False}, out=target
    )
    with build_here():
        proof = onnxq.prove(target, overrides={"engine": "ort"})
    return {
        "plan": onnxq.make_plan(folder / "m.onnx", folder / "d.npz", folder / "c.yaml"),
        "inspect": onnxq.inspect(target),
        "prove": proof,
        "profile": profile(),
        "diff": difference(),
    }


NAMES = ("plan", "inspect", "prove", "profile", "diff")


def shown(name: str, made: Made, **how: object) -> str:
    """The text that a command prints."""
    stream = io.StringIO()
    show(made[name], TextView(stream=stream, **how))
    return stream.getvalue()


def profile() -> Profile:
    groups = tuple(
        GroupCost(
            kind=kind, name=name, ops=("MatMul",), sites=(name,), isolated_db=30.0, leave_one_out_db=21.0, gain_db=1.0
        )
        for kind in ("node", "site")
        for name in names("MatMul")
    )
    prefixes = tuple(PrefixError(node=name, sqnr_db=30.0) for name in names("MatMul"))
    return Profile(sqnr_db=20.0, samples=4, outputs=(), groups=groups, prefixes=prefixes, fixed=(), warnings=())


def difference() -> Difference:
    def error(run: str, against: str) -> Error:
        return Error(run=run, against=against, sqnr_db=24.3, cosine=0.99821, max_abs=0.12, max_rel=0.02, levels=1.0)

    layers = tuple(
        LayerDiff(
            name=name, node=name, op="MatMul", at="", accuracy=(error(OFF, "float"), error(ON, "float")),
            engines=(error(ON, OFF),), drop_db=float(k),
        )
        for k, name in enumerate(names("MatMul_output_0"))
    )  # fmt: skip
    output = OutputDiff(name="y", accuracy=layers[0].accuracy, engines=layers[0].engines)
    runs = tuple(Run(name=name, engine="ONNX Runtime", samples=4) for name in ("float", OFF, ON))
    worst = tuple(reversed(names("MatMul_output_0")))
    return Difference(runs=runs, outputs=(output,), layers=layers, worst=worst, samples=4)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_name_breaks_at_80_columns(made: Made, name: str, verbose: bool) -> None:
    text = shown(name, made, width=WIDTH, verbose=verbose)
    assert max(map(cell_len, text.splitlines())) <= WIDTH
    # A pipe gets whole names.
    whole = shown(name, made, verbose=verbose)
    assert "…" not in whole
    assert names("MatMul")[0] in whole
    words = {word for line in whole.splitlines() for word in re.findall(r"\S+", line)}
    for word in re.findall(r"\S*model/dec\S*", text):
        head, _, tail = word.partition("…")
        assert any(full == word or ("…" in word and full.startswith(head) and full.endswith(tail)) for full in words)
        assert len(word) >= 24
    # What is left of a name that was broken would be a line of its own that no row of the wide table has.
    pieces = [line.strip() for line in text.splitlines() if re.fullmatch(r"\s*[\w./]+", line)]
    assert all(any(piece == word for word in words) for piece in pieces), pieces
    assert "…" in text or all(one in text for one in names("MatMul"))


@pytest.mark.parametrize("name", NAMES)
def test_top_shows_so_many_rows_and_how_many_there_are_beside(made: Made, name: str) -> None:
    whole, few = (shown(name, made, top=top).splitlines() for top in (None, 2))
    more = [line for line in few if re.search(r"and \d+ more; a larger `top=…` shows them", line)]
    assert more
    assert len(few) < len(whole)
    assert int(re.findall(r"and (\d+) more", more[0])[0]) >= LAYERS - 2
    assert not any("top=" in line for line in whole)


def test_top_of_layers_are_those_that_lost_most() -> None:
    text = shown("diff", {"diff": difference()}, top=2)
    table_of_layers = text[text.index("tensor") :]
    found = [name for name in names("MatMul_output_0") if name in table_of_layers]
    assert found == names("MatMul_output_0")[-2:]


@pytest.mark.parametrize("name", NAMES)
def test_json_has_everything_whatever_top_says(made: Made, name: str) -> None:
    if name == "prove":
        text = shown(name, made, top=1, as_json=True)
        assert all(one in text for one in names("MatMul"))
    else:
        assert shown(name, made, top=1, as_json=True) == shown(name, made, as_json=True)


def test_headers_say_how_the_model_was_run() -> None:
    text = shown("diff", {"diff": difference()})
    assert "SQNR as the file says  SQNR as ORT runs it" in text
    assert "as ORT runs it against as the file says" in text
    assert "ort-o" not in text
    # Numbers are never cut.
    assert shown("diff", {"diff": difference()}, width=WIDTH).count("24.3 dB") == text.count("24.3 dB")


@given(st.text(min_size=1, max_size=90), st.integers(3, 60), st.sampled_from([0.33, 0.5, 0.67]))
def test_shortened_names_fit(name: str, width: int, cut: float) -> None:
    short = shorten_name(name, width, cut)
    assert cell_len(short) <= width
    assert short == name or (cell_len(name) > width and "…" in short)


@given(st.lists(st.text("abc/.", min_size=1, max_size=90), min_size=1, max_size=6), st.integers(8, 60))
def test_text_keeps_its_words(words: list[str], width: int) -> None:
    found = fit_words(Text(" ".join(words)), width).plain.split(" ")
    assert [shorten_name(word, width) for word in words] == found


def test_names_are_cut_where_they_still_differ() -> None:
    rows = [(f"/a/very/long/beginning/of/every/name/{k}/and/the/same/long/end/of/all/of/them", "1") for k in range(3)]
    stream = io.StringIO()
    print_renderable(make_table(("name", "n"), [(row[0][30:], row[1]) for row in rows], names=("name",)), stream, 44)
    lines = [line for line in stream.getvalue().splitlines() if "…" in line]
    assert len(set(lines)) == 3


def test_figures_are_never_cut() -> None:
    stream = io.StringIO()
    figures = [f"{k}.25 dB" for k in range(9)]
    table = make_table(["output", *figures], [["y", *figures]], right=figures, names=["output"])
    print_renderable(table, stream, 30)
    assert all(stream.getvalue().count(figure) >= 2 for figure in figures)


def test_first_rows() -> None:
    assert select_rows("abc", TextView()) == ("abc", "")
    assert select_rows("abc", TextView(top=2)) == ("ab", "and 1 more; a larger `top=…` shows them")
    assert select_rows("abc", TextView(), 1) == ("a", f"and 2 more; {MORE}")
    assert select_rows("abc", TextView(verbose=True), 1) == ("abc", "")
    assert select_rows("abc", TextView(top=5), 1) == ("abc", "")
