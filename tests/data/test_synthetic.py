"""Random inputs that fit a model."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnxq.config import DataConfig
from onnxq.data import load_data, make_synthetic
from onnxq.errors import DataError
from onnxq.graph import ValueInfo
from onnxq.runtime import Session
from tests.graph.kit import model
from tests.networks import parse_text


def test_synthetic_inputs_fit_and_repeat() -> None:
    inputs = [
        ValueInfo("image", TensorProto.FLOAT, ("batch", 3, None, None)),
        ValueInfo("half", TensorProto.FLOAT16, ("batch", 5)),
        ValueInfo("ids", TensorProto.INT64, ("batch", "seq")),
        ValueInfo("attention_mask", TensorProto.INT64, ("batch", "seq")),
        ValueInfo("sizes", TensorProto.INT64, (16,)),
        ValueInfo("flag", TensorProto.BOOL, ()),
    ]
    dataset = load_data(None, inputs, DataConfig(samples=3, seed=7))
    first = dataset[0]
    assert dataset.synthetic
    assert len(dataset) == 3
    assert "SYNTHETIC" in dataset.describe()
    assert {name: value.shape for name, value in first.items()} == {
        "image": (1, 3, 224, 224),
        "half": (1, 5),
        "ids": (1, 32),
        "attention_mask": (1, 32),
        "sizes": (16,),
        "flag": (),
    }
    assert first["half"].dtype == np.float16
    assert set(np.unique(first["ids"])) <= {0, 1}
    assert (first["attention_mask"] == 1).all()
    again = load_data(None, inputs, DataConfig(samples=3, seed=7))
    for a, b in zip(dataset.samples(), again.samples(), strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    other = load_data(None, inputs, DataConfig(samples=3, seed=8))
    assert not np.array_equal(other[0]["image"], first["image"])
    differ = {name for name, value in dataset[1].items() if not np.array_equal(value, first[name])}
    assert {"image", "half", "ids"} == differ - {"flag"}
    assert all(part.synthetic for part in dataset.split(1))


def test_synthetic_sizes_can_be_given() -> None:
    ids = ValueInfo("ids", TensorProto.INT64, ("N", "L"))
    dataset = make_synthetic([ids, ValueInfo("y", TensorProto.FLOAT, (None, "L"))], samples=1, dims={"L": 9, "y:0": 2})
    assert {name: value.shape for name, value in dataset[0].items()} == {"ids": (1, 9), "y": (2, 9)}


@pytest.mark.parametrize(
    "value",
    [ValueInfo("s", TensorProto.STRING, (1,)), ValueInfo("u", TensorProto.FLOAT, None), ValueInfo("q", 0, (1,))],
)
def test_synthetic_inputs_that_cannot_be_made(value: ValueInfo) -> None:
    with pytest.raises(DataError, match="give `data="):
        load_data(None, [value])


def test_synthetic_sizes_are_tried_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "g (float[N,3,H,W] x) => (float[M,3,64,64] y) { [fit] y = Reshape(x, s) }"
    proto = parse_text(text, s=np.array([-1, 3, 64, 64]))
    value = ValueInfo("x", TensorProto.FLOAT, ("N", 3, "H", "W"))
    assert load_data(None, [value])[0]["x"].shape == (1, 3, 224, 224)
    sides: list[int] = []
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda self, feeds: sides.append(feeds["x"].shape[2]) or run(self, feeds))
    assert load_data(None, [value], DataConfig(samples=2), proto)[0]["x"].shape == (1, 3, 64, 64)
    # A picture has no length to be guessed beside its sizes, which are tried once each.
    assert len(sides) == len(set(sides)) > 1


def test_a_model_no_size_fits_says_so() -> None:
    proto = parse_text("g (float[N,L] x) => (float[7,11] y) { [fit] y = Reshape(x, shape) }", shape=np.array([7, 11]))
    with pytest.raises(DataError, match=r"none of the sizes tried \(node 'fit'"):
        load_data(None, [ValueInfo("x", TensorProto.FLOAT, ("N", "L"))], None, proto)


@pytest.mark.parametrize("rank", [4, 5])
def test_guesses_make_no_input_of_gigabytes(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Pictures and volumes of which no size is declared, where none of the sizes fits."""
    value = ValueInfo("x", TensorProto.FLOAT, (None,) * rank)
    symbols = ",".join("NCDHW"[:rank])
    proto = parse_text(f"g (float[{symbols}] x) => (float[7] y) {{ [fit] y = Reshape(x, s) }}", s=np.array([7]))
    sizes: list[int] = []
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda self, feeds: sizes.append(feeds["x"].size) or run(self, feeds))
    with pytest.raises(DataError, match="none of the sizes"):
        make_synthetic([value], samples=1, model=proto)
    assert 1 in sizes
    assert max(sizes) <= 2**24


def make_decoder_inputs(whole: str = "total", new: str | int = "sequence") -> list[ValueInfo]:
    """Inputs of a decoder with caches, as exporters declare them."""
    caches = [
        ValueInfo("past_key_values.0.key", TensorProto.FLOAT16, ("batch", 2, "past", 4)),
        # torch.onnx has a symbol for each.
        ValueInfo("past_key_values.0.value", TensorProto.FLOAT16, ("batch", 2, "s77", 4)),
    ]
    return [
        ValueInfo("input_ids", TensorProto.INT64, ("batch", new)),
        ValueInfo("attention_mask", TensorProto.INT64, ("batch", whole)),
        ValueInfo("position_ids", TensorProto.INT64, ("batch", new)),
        *caches,
    ]


@pytest.mark.parametrize("whole", ["total", "past + sequence", None])
@pytest.mark.parametrize("new", ["sequence", 1])
def test_the_sizes_of_a_decoder_s_inputs_fit_each_other(whole: str, new: str | int) -> None:
    sample = make_synthetic(make_decoder_inputs(whole, new), samples=1)[0]
    count, past = sample["input_ids"].shape[1], sample["past_key_values.0.key"].shape[2]
    assert past == 8
    assert sample["attention_mask"].tolist() == [[1] * (past + count)]
    assert sample["position_ids"].tolist() == [list(range(past, past + count))]


@pytest.mark.recent_ort
def test_a_decoder_that_takes_prompts_without_caches_alone_gets_those() -> None:
    """As onnxruntime-genai's builder writes the mask of MultiHeadAttention."""
    inputs = make_decoder_inputs()
    nodes = [helper.make_node("Add", ["input_ids", "attention_mask"], ["y"], "add")]
    declared = [helper.make_tensor_value_info(value.name, value.dtype, value.shape) for value in inputs]
    out = helper.make_tensor_value_info("y", TensorProto.INT64, ["batch", "total"])
    proto = helper.make_model(helper.make_graph(nodes, "g", declared, [out]), ir_version=8)
    sample = make_synthetic(inputs, samples=1, model=proto)[0]
    assert sample["past_key_values.0.key"].shape == (1, 2, 0, 4)
    assert sample["input_ids"].shape == sample["attention_mask"].shape == (1, 32)


def test_both_branches_of_a_merged_decoder_get_samples() -> None:
    inputs = [*make_decoder_inputs(), ValueInfo("use_cache_branch", TensorProto.BOOL, (1,))]
    dataset = make_synthetic(inputs, samples=4)
    for k, (cached, past) in enumerate(((True, 8), (False, 0)) * 2):
        sample = dataset[k]
        assert sample["use_cache_branch"].tolist() == [cached]
        assert sample["past_key_values.0.value"].shape == (1, 2, past, 4)
        assert sample["attention_mask"].shape[1] == past + sample["input_ids"].shape[1]
        assert sample["position_ids"][0, 0] == past


def test_floats_that_a_table_is_read_by_are_rows_of_it() -> None:
    """As Keras exports an embedding."""
    proto = model(
        "g (float[1,L] x) => (float[1,L,4] y) { [c] ids = Cast<to=7>(x) [g] y = Gather(table, ids) }",
        table=np.ones((80, 4), "f4"),
    )
    drawn = load_data(None, [ValueInfo("x", TensorProto.FLOAT, (1, "L"))], DataConfig(samples=4), proto)[0]["x"]
    assert drawn.dtype == np.float32
    np.testing.assert_array_equal(drawn, np.round(drawn))
    assert 20 < drawn.max() < 80


def test_images_have_all_values_and_lengths_are_those_of_the_samples() -> None:
    """Most of an encoder of speech, or of a voice, would be hidden behind lengths of 0 and 1."""
    shapes = {"image": (1, 32, 32, 3), "flags": (1, 64)}
    pictures = [ValueInfo(name, TensorProto.UINT8, shape) for name, shape in shapes.items()]
    frames = ValueInfo("audio", TensorProto.FLOAT, ("N", 80, "T"))
    sample = make_synthetic([*pictures, frames, ValueInfo("audio_lens", TensorProto.INT64, ("N",))], samples=1)[0]
    assert np.percentile(sample["image"], [0, 100]).tolist() == [0, 255]
    assert set(np.unique(sample["flags"])) == {0, 1}
    assert sample["audio_lens"].tolist() == [sample["audio"].shape[2]]


def test_a_length_that_the_model_does_not_run_with_is_another() -> None:
    proto = parse_text(
        "g (float[T,N,4] x, int32[N] lens) => (float[T,A,N,3] y) { [l] y = LSTM<hidden_size = 3>(x, w, r, , lens) }",
        w=np.ones((1, 12, 4), "f4"),
        r=np.ones((1, 12, 3), "f4"),
    )
    inputs = [ValueInfo("x", TensorProto.FLOAT, ("T", "N", 4)), ValueInfo("lens", TensorProto.INT32, ("N",))]
    sample = load_data(None, inputs, DataConfig(samples=1), proto)[0]
    assert sample["x"].shape[0] == 1
    assert set(sample["lens"].tolist()) <= {0, 1}
