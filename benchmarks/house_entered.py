"""The files whose functions run when one process quantizes a small net, a line each: a figure of house.py."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from pathlib import Path
from types import FrameType

import numpy as np
from onnx import numpy_helper, parser

import onnxq

ROOT = Path(__file__).resolve().parents[1]
# Names of code that Python makes of comprehensions, generator expressions and annotations.
_INNER = re.compile("<(list|set|dict)comp>|<genexpr>|__annotate__")

NET = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[N,3,16,16] x) => (float[N,10] y) {
        a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, conv)
        b = Relu(a)
        c = GlobalAveragePool(b)
        d = Flatten(c)
        y = Gemm(d, gemm)
    }"""


def main() -> None:
    """Print the paths, sorted."""
    model = parser.parse_model(NET)
    rng = np.random.default_rng(0)
    for name, shape in {"conv": (16, 3, 3, 3), "gemm": (16, 10)}.items():
        values = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    samples = {"x": rng.standard_normal((8, 3, 16, 16)).astype(np.float32)}
    paths: set[str] = set()

    def note_call(frame: FrameType, event: str, _: object) -> None:
        # Bodies of modules and classes, which an import runs, are not optimized code; comprehensions in them are until
        # Python 3.12, and those of a function are in the file of one that runs.
        code = frame.f_code
        if (
            event == "call"
            and code.co_flags & inspect.CO_OPTIMIZED
            and not _INNER.search(code.co_name)
        ):
            paths.add(code.co_filename)

    threading.setprofile(note_call)
    sys.setprofile(note_call)
    onnxq.quantize(model, samples)
    sys.setprofile(None)
    folders = tuple(str(ROOT / package) for package in ("onnxq", "torch_frontend"))
    print(*sorted(path for path in paths if path.startswith(folders)), sep="\n")


if __name__ == "__main__":
    main()
