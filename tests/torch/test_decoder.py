"""The tiny decoder as torch.onnx exports it, with a symbol for the length of each cache."""

import onnx
import pytest

torch = pytest.importorskip("torch", reason="torch exports the decoder")
pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")

import onnxq
from onnxq.backends import load_config
from tests.decoders.generation import Player, make_samples
from tests.decoders.net import Decoder
from tests.decoders.sizes import SIZES, load_weights
from tests.decoders.test_modes import ALL, MODES, NEXT, PROMPT, QUICK, WORST
from tests.decoders.text import decode_tokens


@pytest.fixture(scope="module")
def exported() -> onnx.ModelProto:
    net = Decoder()
    net.load_state_dict({name: torch.from_numpy(value) for name, value in load_weights().items()})
    caches = [tuple(torch.zeros(1, SIZES.key_heads, 5, SIZES.head) for _ in range(2)) for _ in range(SIZES.layers)]
    free = torch.export.Dim.DYNAMIC
    names = [f"past_key_values.{layer}.{part}" for layer in range(SIZES.layers) for part in ("key", "value")]
    ids, positions = torch.ones(1, 3, dtype=torch.long), torch.arange(5, 8)[None]
    tokens = ("input_ids", "attention_mask", "position_ids")
    program = torch.onnx.export(
        net.eval(),
        (ids, torch.ones(1, 8, dtype=torch.long), positions, caches),
        dynamo=True,
        verbose=False,
        dynamic_shapes={name: {1: free} for name in tokens} | {"past": [({2: free}, {2: free})] * SIZES.layers},
        input_names=[*tokens, *names],
        output_names=["logits", *(name.replace("past_key_values", "present") for name in names)],
    )
    return program.model_proto


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_decoder_that_torch_exported(exported: onnx.ModelProto) -> None:
    player = Player(exported)
    assert decode_tokens(player.generate(PROMPT)) == NEXT
    for mode in ("static", "4 bits, float16"):
        after = Player(onnxq.quantize(exported, make_samples(player), MODES[mode], overrides=QUICK).model)
        assert decode_tokens(after.generate(PROMPT)) == NEXT, mode
        assert after.measure_perplexity() < WORST.get(mode, 1.002) * player.measure_perplexity(), mode
    # Without samples, made-up ones fit: lengths of tokens, caches and the mask of both.
    assert len(onnxq.make_plan(exported, None, load_config("ort-int8", ALL)).sites) == 24
