"""Random operators draw the same numbers in every run, of the distribution that the node says."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.graph import fix_noise, strip_weights
from onnxq.runtime import Session
from tests.networks import open_session, parse_text

X = np.random.default_rng(0).standard_normal((1, 8, 4000)).astype(np.float32)


@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        ("RandomNormalLike<mean=2.0, scale=0.5, seed=3.0>(x)", 2.0, 0.5),
        ("RandomUniformLike<low=-1.0, high=3.0>(x)", 1.0, 4 / 12**0.5),
        ("RandomNormal<shape=[1,8,4000], scale=3.0>()", 0.0, 3.0),
        ("RandomUniform<shape=[1,8,4000]>()", 0.5, 1 / 12**0.5),
    ],
)
def test_numbers_are_those_of_the_distribution_in_every_run(draw: str, mean: float, deviation: float) -> None:
    alone = parse_text(f"g (float[1,8,N] x) => (float[1,8,N] y) {{ y = {draw} }}")
    beside = parse_text(f"g (float[1,8,N] x) => (float[1,8,N] y, float[1,8,N] z) {{ z = {draw} y = {draw} }}")
    session = Session(alone)
    first = session.run({"x": X})["y"]
    assert first.mean() == pytest.approx(mean, abs=0.06)
    assert first.std() == pytest.approx(deviation, rel=0.05)
    for again in (session, Session(beside, optimize=False), Session(strip_weights(beside))):
        outputs = again.run({"x": X})
        np.testing.assert_array_equal(outputs["y"], first)
    assert abs(np.corrcoef(outputs["y"].ravel(), outputs["z"].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("data", "attribute", "opset", "kind"),
    [("float16", "", 17, "float16"), ("float16", "<dtype=1>", 17, "float"), ("float", "<dtype=11>", 12, "double")],
)
def test_types_stay(data: str, attribute: str, opset: int, kind: str) -> None:
    text = f"g ({data}[1,8,N] x) => ({kind}[1,8,N] y) {{ y = RandomNormalLike{attribute}(x) }}"
    fixed = fix_noise(parse_text(text, opset=opset))
    onnx.checker.check_model(fixed, full_check=True)
    values = open_session(fixed).run(None, {"x": X.astype("float32" if data == "float" else data)})[0]
    assert (values.dtype.name, values.shape) == ({"float": "float32", "double": "float64"}.get(kind, kind), X.shape)


def test_noise_in_a_branch_is_fixed_and_other_models_are_handed_back() -> None:
    taken, other = "t () => (float[N] a) { a = RandomNormalLike(x) }", "e () => (float[N] b) { b = Neg(x) }"
    branches = f"then_branch = {taken}, else_branch = {other}"
    session = Session(parse_text(f"g (bool c, float[N] x) => (float[N] y) {{ y = If (c) <{branches}> }}"))
    feeds = {"c": np.array(True), "x": X[0, 0]}
    np.testing.assert_array_equal(session.run(feeds)["y"], session.run(feeds)["y"])
    plain = parse_text("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    assert fix_noise(plain) is plain


def test_a_network_with_noise_is_quantized_to_the_same_bytes(tmp_path: Path) -> None:
    """VITS, as voices of Piper have it: refused before, since two runs of the float model differ."""
    rng = np.random.default_rng(1)
    voice = parse_text(
        """g (float[N,8,T] x) => (float[N,16,T] y) {
            [noise] r = RandomNormalLike(x) [scaled] n = Mul(r, s) [noisy] z = Add(x, n)
            [first] a = Conv<pads=[1,1]>(z, w) [act] b = Relu(a) [second] y = Conv<pads=[1,1]>(b, v) }""",
        s=0.667,
        w=rng.standard_normal((16, 8, 3)).astype(np.float32) / 5,
        v=rng.standard_normal((16, 16, 3)).astype(np.float32) / 7,
    )
    samples = {"x": rng.standard_normal((16, 1, 8, 40)).astype(np.float32)}
    for name in ("one", "two"):
        done = onnxq.quantize(voice, samples, config="virtual-int8")
        done.save(tmp_path / name)
        assert done.report.checks[0].sqnr_db[0] > 25
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
