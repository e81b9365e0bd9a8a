"""Models as other tools' suites have them: each once, with the samples of its suite, for one of the targets in turn."""

from pathlib import Path

import pytest

import onnxq
from tests.fuzz.judge import check_result
from tests.fuzz.peers.build import Peer
from tests.fuzz.peers.catalogue import SUITES
from tests.motifs.test_motifs import FORCED, STATIC

# Nothing but pairs or integers, of which nothing can be quantized; a plugin, with which nothing can be calibrated.
REFUSED = {"Q113", "Q125"}
RECENT = [pytest.mark.recent_ort]
_CASES = [(f"{suite}: {name}", name, peer) for suite, peers in SUITES.items() for name, peer in peers.items()]


@pytest.mark.parametrize(
    ("name", "peer", "number"),
    [pytest.param(*case, k, id=title, marks=RECENT * ("another" in title)) for k, (title, *case) in enumerate(_CASES)],
)
def test_a_model_of_a_suite(name: str, peer: Peer, number: int, tmp_path: Path) -> None:
    """Forced in every other turn; `python -m tests.fuzz.suites --peers` runs all for all."""
    model, samples = peer.make(name)
    samples = samples[: peer.counts[0]]
    turn, at = divmod(number, len(STATIC))
    config = onnxq.load_config(STATIC[at], FORCED if turn % 2 == 0 else {})
    out = tmp_path / "out.onnx"
    try:
        result = onnxq.quantize(
            model,
            samples if any(samples) else None,
            config,
            overrides={"latency": False, "threads": 1, "run_threads": 1},
            out=out,
        )
    except onnxq.OnnxqError as error:
        if error.code not in REFUSED:
            raise
        return
    check_result(result, out, model, samples, target=config.target)
