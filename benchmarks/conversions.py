#!/usr/bin/env python3
"""Convert other tools' files to another engine, and compare kernels and answers with the file and with onnxq's own.

    python benchmarks/conversions.py --corpus DIR efficientnet_lite0=ort-minmax:trt minilm_l6=modelopt:ort \
        --peer modelopt=/venv/bin/python [--samples 32] [--judged 16]

A target with a + behind it is that with `--complete`, which quantizes what the tool left float, too.
A corpus is a folder as in `corpus.py`; tools are those of `peer_tools.py`, in this interpreter or the one that --peer
names. The first --samples calibrate, the next --judged are answered. A row has the products by type in the target's
engine, as `prove` finds them, and the SQNR in dB against the float model, as the file says, over all judged samples:
of the tool's file, of the converted one, and of onnxq's own for this target from the same samples; then the converted
file against the tool's, the weights whose integers stayed, and megabytes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import onnxq
from corpus import calibration
from measure import run, table
from onnxq.backends import find_backend
from onnxq.commands.convert import KernelTypes
from onnxq.evaluation.compare import ModelErrors
from onnxq.pipeline.retarget import Kept
from onnxq.runtime import Session

TOOLS = Path(__file__).resolve().parent / "peer_tools.py"
HEAD = ["model", "from", "to", "kernels of the file", "converted", "onnxq's own", "file dB", "converted dB", "own dB",
        "converted / file dB", "integers kept", "MB"]  # fmt: skip
Samples = list[dict[str, np.ndarray]]
Answers = list[Mapping[str, np.ndarray]]


def answer(path: Path, samples: Samples) -> Answers:
    """The answers of a file, as it says."""
    session = Session(path, optimize=False)
    return [dict(session.run(feeds)) for feeds in samples]


def measure_db(wanted: Answers, got: Answers, samples: Samples) -> str:
    """The SQNR of the worst output over all samples."""
    errors = ModelErrors()
    for feeds, exact, answers in zip(samples, wanted, got, strict=True):
        errors.update(feeds, exact, answers)
    return f"{min(output.whole_db for output in errors.results()):.1f}"


def convert(subject: str, args: argparse.Namespace) -> list[str]:
    """One row of the table."""
    name, _, way = subject.partition("=")
    tool, _, to = way.partition(":")
    to, plus, _ = to.partition("+")
    source = args.corpus / "models" / f"{name}.onnx"
    with np.load(calibration(args.corpus, name, args.out, args.samples + args.judged)) as stored:
        arrays = {key: stored[key] for key in stored}
    data, made = args.out / f"{name}.calib.npz", args.out / f"{name}.{tool}.onnx"
    np.savez(data, **{key: value[: args.samples] for key, value in arrays.items()})
    if not made.exists():
        run([args.peer.get(tool, sys.executable), TOOLS, tool, source, data, made]).checked(tool)
    converted, own = (
        args.out / f"{name}.{tool}.{kind}{plus}.{to}.onnx" for kind in ("converted", "own")
    )
    overrides = {"latency": False, "convert.complete": bool(plus)}
    done = onnxq.convert(made, to, data, overrides=overrides, out=converted, force=True)
    onnxq.quantize(source, data, f"{to}-int8", overrides={"latency": False}, out=own, force=True)
    engine = next(engine.name for engine in find_backend(to).engines if engine.installed)
    proof = onnxq.prove(own, overrides={"engine": engine})
    samples = [
        {key: value[k : k + 1] for key, value in arrays.items()}
        for k in range(args.samples, args.samples + args.judged)
    ]
    exact, *said = (answer(path, samples) for path in (source, made, converted, own))
    kept = Counter(site.how for site in done.sites if site.role == "weight")
    changed = (
        (done.kernels.before, done.kernels.after)
        if done.kernels is not None
        else (KernelTypes(), KernelTypes())
    )
    kernels = (*changed, KernelTypes(count=len(proof.kernels), types=proof.by_op()))
    return [
        name,
        tool,
        to + plus,
        *(each.describe() for each in kernels),
        *(measure_db(exact, each, samples) for each in said),
        measure_db(said[0], said[1], samples),
        f"{kept[Kept.INTEGERS]} of {sum(kept.values())}",
        " / ".join(f"{path.stat().st_size / 1e6:.1f}" for path in (made, converted, own)),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subjects", nargs="+", metavar="NAME=TOOL:TARGET")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--peer", action="append", default=[], metavar="TOOL=PYTHON")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--judged", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("out/conversions"))
    args = parser.parse_args()
    args.peer = dict(peer.split("=", 1) for peer in args.peer)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for subject in args.subjects:
        rows.append(convert(subject, args))
        print(*rows[-1], sep="  ", flush=True)
    print(table(rows, HEAD))


if __name__ == "__main__":
    main()
