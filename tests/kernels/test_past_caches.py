"""Large outputs that begin on a line are written past the caches: the same bits as those that are not."""

import ctypes

import numpy as np
import pytest

from onnxq.kernels import DType, Layout
from tests.kernels.machines import NUMPY, Case

LARGE = 16 << 20
GUARD = 64
# Elements of float32. Spans; columns in one tile, in several, and with a last row that is not full; blocks both ways.
LAYOUTS = {
    "tensor": Layout(1, 1, 1 << 22),
    "channels": Layout(2, 2048, 1040),
    "columns": Layout(1 << 14, 257, 1),
    "narrow columns": Layout((1 << 17) + 1, 33, 1),
    "wide columns": Layout(1 << 11, 2080, 1),
    "blocks": Layout(1 << 11, 2080, 1, 32),
    "blocks of rows": Layout(1, 2080, 1 << 11, 48),
}


def guarded(like: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory for one more like it, `offset` bytes behind the start of a line, and all of what was allocated."""
    whole = np.full(like.nbytes + 3 * GUARD, 0x55, np.uint8)
    begin = GUARD - whole.ctypes.data % GUARD + offset
    return whole[begin : begin + like.nbytes].view(like.dtype), whole


def results(library: ctypes.CDLL, one: Case, offset: int, threads: int) -> list[bytes]:
    """y, dx alone, dx beside sums, and the sums, in memory at this offset."""
    one.threads = threads
    out = []
    for forward, sums in ((True, False), (False, False), (False, True)):
        written, whole = guarded(one.x, offset)
        names = {name: np.zeros_like(one.scale) for name in ("dscale", "dzero_point")} if sums else {}
        run = library.fq_cpu_forward if forward else library.fq_cpu_backward
        assert run(ctypes.byref(one.call(y=written, **names))) == 0
        begin = written.ctypes.data - whole.ctypes.data
        assert (whole[:begin] == 0x55).all()
        assert (whole[begin + written.nbytes :] == 0x55).all()
        out += [written.tobytes(), *(values.tobytes() for values in names.values())]
    return out


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits(library: ctypes.CDLL, name: str, dtype: DType) -> None:
    layout = LAYOUTS[name]
    if dtype is DType.BF16:  # twice as many of its elements make as many bytes
        layout = Layout(layout.outer * 2, layout.channels, layout.inner, layout.block)
    rng = np.random.default_rng(0)
    assert layout.count * dtype.size >= LARGE
    x, dy = (np.resize(rng.normal(0, 4, 100_003), layout.count).astype(NUMPY[dtype]) for _ in range(2))
    scale = rng.uniform(0.3, 0.5, layout.scales).astype(np.float32)
    zero = rng.integers(-3, 3, layout.scales).astype(np.float32)
    one = Case(x, scale, zero, layout, -8, 7, dy=dy)
    usual = results(library, one, dtype.size, 1)
    assert results(library, one, 0, 1) == usual
    assert results(library, one, 0, 3) == usual
