#!/usr/bin/env python3
"""The command on ONNX exports of the nets of torchvision, timm and transformers, beside onnxruntime's quantize_static.

    python benchmarks/exports.py
    python benchmarks/exports.py resnet18 timm/ hf/gpt2 --target openvino --rows rows.jsonl

The nets are those of torch_nets.py: small variants with random weights, whose BatchNorms know the statistics of their
inputs. Each is exported by torch.onnx (by its older exporter where the newer fails), quantized on 24 samples by `onnxq
quantize` as it stands and by quantize_static after its own preprocessing, and both files are compared with the float
one on 8 other samples: SQNR of the worst float output, in ONNX Runtime without and with optimizations, whichever is
worse. Images are smooth noise, tokens are drawn evenly. --rows keeps one line of JSON a net, and goes on behind those
it has.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from measure import onnxq, run, table
from torch_nets import choose_nets, describe_versions, make_parser, measure_nets, parse_names

TOOLS = Path(__file__).with_name("peer_tools.py")
Arrays = dict[str, np.ndarray]


@dataclass
class Row:
    """A net's line of the table. own_db, static_db: None where there is no file that ONNX Runtime runs."""

    net: str
    own_db: float | None = None
    static_db: float | None = None
    smaller: float = 0.0
    seconds: float = 0.0
    reason: str = ""


def draw_like(value: Tensor, generator: torch.Generator) -> Tensor:
    """A sample like an example: smooth images, other floats normal, tokens evenly drawn, masks as they are."""
    if not value.is_floating_point():
        low, high = int(value.min()), int(value.max())
        if low == high or value.dtype is torch.bool:
            return value
        return torch.randint(low, high + 1, value.shape, generator=generator, dtype=value.dtype)
    noise = torch.randn(value.shape, generator=generator)
    if value.ndim != 4:
        return noise
    coarse = torch.randn(*value.shape[:2], 6, 6, generator=generator)
    return nn.functional.interpolate(coarse, value.shape[2:], mode="bicubic") + 0.3 * noise


def export_net(net: nn.Module, inputs: Any, path: Path) -> None:
    """Write the net with settled BatchNorms."""
    values = inputs if isinstance(inputs, dict) else {"": inputs}
    generator = torch.Generator().manual_seed(0)
    if hasattr(net, "config"):
        # Objects that hold caches are no outputs.
        net.config.use_cache = False
    net.train()
    with torch.no_grad():
        for _ in range(8):
            drawn = {name: draw_like(value, generator) for name, value in values.items()}
            net(**drawn) if isinstance(inputs, dict) else net(*drawn.values())
    net.eval()
    arguments, named = ((), inputs) if isinstance(inputs, dict) else ((inputs,), None)
    try:
        torch.onnx.export(
            net, arguments, path, kwargs=named, dynamo=True, external_data=False, verbose=False
        )
    except Exception:  # the older exporter traces what this one cannot
        torch.onnx.export(net, arguments, path, kwargs=named, dynamo=False, opset_version=17)


def draw_samples(inputs: Any, names: list[str], count: int, seed: int) -> Arrays:
    """So many samples, [samples, …shape of an input]."""
    values = inputs if isinstance(inputs, dict) else {names[0]: inputs}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.stack([draw_like(values[name], generator) for _ in range(count)]).numpy()
        for name in names
    }


def open_session(path: Path, *, optimize: bool) -> onnxruntime.InferenceSession:
    """A session that says nothing."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run_samples(path: Path, samples: Arrays, *, optimize: bool) -> dict[str, np.ndarray]:
    """The float outputs of all samples, side by side."""
    session = open_session(path, optimize=optimize)
    names = [output.name for output in session.get_outputs() if "float" in output.type]
    count = len(next(iter(samples.values())))
    runs = [
        session.run(names, {name: values[k] for name, values in samples.items()})
        for k in range(count)
    ]
    return {
        name: np.concatenate([np.ravel(each[k]) for each in runs]) for k, name in enumerate(names)
    }


def measure_file(path: Path, exact: dict[str, np.ndarray], samples: Arrays) -> float | None:
    """The worst output's SQNR in dB, at most 99; None for a file that does not run."""
    worst = 99.0
    for optimize in (False, True):
        try:
            outputs = run_samples(path, samples, optimize=optimize)
        except Exception:  # ONNX Runtime's own kinds have no common base
            return None
        for name, value in exact.items():
            noise = float(np.square(outputs[name] - value, dtype=np.float64).sum())
            signal = float(np.square(value, dtype=np.float64).sum())
            if noise and signal:
                worst = min(worst, 10 * float(np.log10(signal / noise)))
    return round(worst, 1)


def measure_net(
    name: str, make: Callable[[], tuple[nn.Module, Any]], target: str, folder: Path
) -> Row:
    """Export, quantize and compare one net."""
    row = Row(name)
    source, data, own, static = (
        folder / part for part in ("net.onnx", "data.npz", "own.onnx", "static.onnx")
    )
    torch.manual_seed(0)
    net, inputs = make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export_net(net, inputs, source)
        names = [entry.name for entry in open_session(source, optimize=False).get_inputs()]
        np.savez(data, **draw_samples(inputs, names, 24, 1))
        samples = draw_samples(inputs, names, 8, 2)
        exact = run_samples(source, samples, optimize=False)
    except Exception as error:  # what does not come out of torch is no result of a quantizer
        row.reason = f"not exported: {str(error).strip().splitlines()[0][:100]}"
        return row
    made = run(
        onnxq(
            "quantize", source, "--data", data, "--target", target, "--no-latency", "-q", "-o", own
        )
    )
    row.seconds = round(made.seconds, 1)
    if made.code:
        row.reason = made.last_line[:120]
    else:
        row.own_db = measure_file(own, exact, samples)
        row.smaller = round(source.stat().st_size / own.stat().st_size, 1)
    if not run([sys.executable, TOOLS, "ort-minmax", source, data, static]).code:
        row.static_db = measure_file(static, exact, samples)
    return row


def print_table(rows: list[Row], target: str) -> None:
    """The table, and below it what fails and the medians of the nets that both have a file of."""
    cells = [
        ["" if value is None else str(value) for value in list(asdict(row).values())[:-1]]
        for row in rows
    ]
    print(
        table(
            cells, ("net", f"onnxq for {target}, dB", "quantize_static, dB", "times smaller", "s")
        )
    )
    for row in rows:
        if row.reason:
            print(f"\n- `{row.net}`: {row.reason}")
    both = [
        (row.own_db, row.static_db)
        for row in rows
        if row.own_db is not None and row.static_db is not None
    ]
    if not both:
        return
    own, static = ([pair[k] for pair in both] for k in (0, 1))
    exported = [row for row in rows if not row.reason.startswith("not exported")]
    print(
        f"\n{sum(row.own_db is not None for row in exported)} of {len(exported)} by onnxq, "
        f"{sum(row.static_db is not None for row in exported)} by quantize_static; of both, median "
        f"{statistics.median(own):.1f} and {statistics.median(static):.1f} dB, below 20 dB "
        f"{sum(value < 20 for value in own)} and {sum(value < 20 for value in static)}; {describe_versions()}, "
        f"onnxruntime {onnxruntime.__version__}"
    )


def main(arguments: list[str]) -> None:
    """Measure the nets asked for and print their table."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--target", default="ort", help="of onnxq's files; quantize_static's are for ONNX Runtime"
    )
    options = parse_names(parser, arguments)

    def measure(name: str, make: Callable[[], tuple[nn.Module, Any]]) -> Row:
        with tempfile.TemporaryDirectory() as folder:
            return measure_net(name, make, options.target, Path(folder))

    rows = measure_nets(choose_nets(options.names), Row, measure, options.rows)
    print_table(rows, options.target)


if __name__ == "__main__":
    main(sys.argv[1:])
