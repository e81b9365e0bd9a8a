#!/usr/bin/env python3
"""onnxq beside other tools on the same samples, one table a model: metric, SQNR, seconds, peak memory.

    python benchmarks/peers.py --corpus DIR efficientnet_lite0 fmnist_resnet:64 --efforts fast balanced
    python benchmarks/peers.py --corpus DIR minilm_l6 --peer modelopt=/venv/bin/python --peer nncf=/venv2/bin/python
    python benchmarks/peers.py --corpus DIR minilm_l6 --efforts --onnxq 'dynamic=--config ort-dynamic' \
        --peers ort-dynamic --lengths 16 64 256 --also 'AVX2=python -m tests.cpus.avx2'

A model is NAME of models/NAME.onnx, with :N samples of its own if need be. Peers: onnxruntime's quantize_static, and
ModelOpt, NNCF and Quark where this interpreter has them or `--peer NAME=PYTHON` names one that has; `peer_tools.py`
says what each is asked for. Every tool runs in a child of its own, one after the other, least of --rounds; onnxq checks
its result as always but does not time it. A tool that fails says why. Below a table stands how long onnxq takes beside
the fastest peer that quantized anything into a file that runs; --memory adds what it takes for more samples, --lengths
how fast the files are beside float, all of a model interleaved in one process, --also scores under a command.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from measure import Run, run, table
from subjects import Score, Subject, brief, subject

HERE = Path(__file__).resolve().parent
TOOLS = HERE / "peer_tools.py"
# Peers by name, and the package of each: kept here too, for the parent imports none of their files.
PACKAGES = {
    "ort-minmax": "onnxruntime", "ort-percentile": "onnxruntime", "ort-entropy": "onnxruntime",
    "ort-minmax-symmetric": "onnxruntime", "ort-percentile-symmetric": "onnxruntime",
    "modelopt": "modelopt", "modelopt-entropy": "modelopt", "nncf": "nncf", "quark": "quark",
    "ort-dynamic": "onnxruntime", "optimum-dynamic": "optimum", "quark-dynamic": "quark",
}  # fmt: skip
# Tools for TensorRT, whose files ONNX Runtime's optimizations are not for: they are scored as they are written. (Of one
# with float16 around int8, onnxruntime 1.32 with optimizations makes -9 dB where it has 13 dB without.)
AS_WRITTEN = ("modelopt", "modelopt-entropy")
DEFAULT = ("ort-minmax", "ort-percentile", "modelopt", "nncf", "quark")


@dataclass(frozen=True)
class Row:
    """The file that one tool made of one model. operators: that hold or make integers; 0: the float model handed back.

    also: the scores under other commands. speeds: times as fast as float, by length.
    """

    tool: str
    made: Run
    score: Score
    operators: int = 0
    target: Path | None = None
    also: tuple[Score, ...] = ()
    speeds: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether there is a file that ONNX Runtime takes."""
        return self.target is not None and not self.score.error

    def cells(self) -> list[str]:
        """One line of the table."""
        said = "" if self.operators or self.score.error else "nothing quantized"
        metric = "" if self.score.metric is None else f"{self.score.metric:.4f}"
        sqnr = "" if self.score.sqnr is None else f"{self.score.sqnr:.1f}"
        cost = [
            f"{self.made.seconds:.1f}",
            f"{self.made.cpu_seconds:.1f}",
            f"{self.made.peak_mb:.0f}",
        ]
        size = f"{self.target.stat().st_size / 1e6:.2f}" if self.target is not None else ""
        more = [*map(str, self.also), *self.speeds]
        return [self.tool, metric, sqnr, *cost, size, *more, said or brief(self.score.error)]


def fastest(command: Sequence[str | Path], rounds: int) -> Run:
    """The least of several runs in time and memory; the first failure instead."""
    runs = []
    for _ in range(rounds):
        try:
            runs.append(run(command, {"PYTHONSAFEPATH": "1"}))
        except OSError as error:  # no such interpreter
            return Run(127, 0.0, 0.0, f"OSError: {error}")
        if runs[-1].code:
            return runs[-1]
    best = min(runs, key=lambda one: one.seconds)
    return replace(best, peak_mb=min(one.peak_mb for one in runs))


def of_peer(tool: str, python: str, one: Subject, target: Path, rounds: int) -> Row:
    """A peer's file, counted by its own onnx and scored by the corpus."""
    target.unlink(missing_ok=True)
    made = fastest([python, TOOLS, tool, one.source, one.data, target], rounds)
    if made.code:
        return Row(tool, made, Score(error=f"failed: {reason(made)}"))
    if not target.exists():
        return Row(tool, made, Score(error="no file"))
    counted = run([python, TOOLS, "count", target]).checked("counting")
    score = one.score(target, optimize=tool not in AS_WRITTEN)
    return Row(f"{tool} ({made.last_line})", made, score, int(counted.last_line), target)


def of_onnxq(label: str, options: Sequence[str], one: Subject, target: Path, rounds: int) -> Row:
    """onnxq's file, by the command as people run it; without samples where the options say --no-data."""
    best: Run | None = None
    report: dict[str, object] = {}
    for _ in range(rounds):
        made, report = one.quantized(target, *options)
        if made.code:
            return Row(f"onnxq {label}", made, Score(error=f"failed: {reason(made)}"))
        best = made if best is None or made.seconds < best.seconds else best
    assert best is not None
    return Row(f"onnxq {label}", best, one.score(target), int(str(report["pairs"])), target)


def time_rows(rows: Sequence[Row], one: Subject, length: int, threads: int) -> list[str]:
    """How many times as fast as float each row's file is: median and range of the blocks; "" for those without one."""
    files = {str(k): row.target for k, row in enumerate(rows) if row.runs}
    command = [
        sys.executable,
        HERE / "latency.py",
        f"float={one.source}",
        *(f"{k}={each}" for k, each in files.items()),
    ]
    command += [
        "--data",
        one.data,
        "--json",
        "--threads",
        str(threads),
        *(["--length", str(length)] if length else []),
    ]
    found = {row["name"]: row for row in json.loads(run(command).checked("latency.py").last_line)}
    text = {
        k: f"{found[k]['ratio']:.2f} ({found[k]['ratio_low']:.2f}-{found[k]['ratio_high']:.2f})"
        for k in files
    }
    return [text.get(str(k), "") for k in range(len(rows))]


def reason(made: Run) -> str:
    """The line that says why: the last that reads like an exception, else the last."""
    lines = [line.strip() for line in made.output.splitlines() if line.strip()]
    if made.code < 0:
        return f"ended by signal {-made.code}"
    told = [
        line for line in lines if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]
    ]
    return (told or lines or ["no output"])[-1]


def beside(rows: Sequence[Row], label: str) -> str:
    """How long one of our rows takes beside the fastest peer that quantized anything into a file that runs.

    Where none did, beside the fastest that ended at all.
    """
    ours = next((row for row in rows if row.tool == label and not row.score.error), None)
    ended = [row for row in rows if not row.tool.startswith("onnxq") and not row.score.error]
    useful = [row for row in ended if row.operators]
    if ours is None or not ended:
        return f"{label}: {'no peer made a file that runs' if ours else 'failed'}"
    best = min(useful or ended, key=lambda row: row.made.seconds)
    ratio, busy = (
        ours.made.seconds / best.made.seconds,
        ours.made.cpu_seconds / best.made.cpu_seconds,
    )
    who = (
        f"the fastest peer, {best.tool}"
        if useful
        else f"{best.tool}, and no peer quantized anything"
    )
    return f"{label} takes {ratio:.1f} times as long (CPU time {busy:.1f}) as {who}"


def memory(one: Subject, counts: Sequence[int], effort: str, out: Path) -> str:
    """Peak memory and seconds against the number of samples: the same ones again, with a little noise."""
    rows = []
    for count in counts:
        data = out / f"{one.name}.times{count}.npz"
        run([sys.executable, HERE / "subjects.py", one.data, str(count), data]).checked(
            "more samples"
        )
        more = Subject(one.name, one.source, data, None)
        made, _ = more.quantized(out / f"{one.name}.memory.onnx", "--effort", effort)
        said = (
            [f"{made.peak_mb:.0f}", f"{made.seconds:.1f}"]
            if not made.code
            else ["failed", brief(reason(made))]
        )
        rows.append([str(count), f"{data.stat().st_size / 1e6:.0f}", *said])
        data.unlink()
    return table(
        rows, [f"{one.name}, onnxq {effort}: samples", "MB of samples", "peak MB", "seconds"]
    )


def interpreters(asked: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Which Python runs which peer; those whose package is nowhere are left out, with a word."""
    given = dict(item.partition("=")[::2] for item in asked)
    unknown = sorted(set(given) - set(PACKAGES) | set(names) - set(PACKAGES))
    if unknown:
        sys.exit(f"no peer called {', '.join(unknown)}; there are {', '.join(PACKAGES)}")
    chosen = {}
    for name in dict.fromkeys((*names, *given)):
        family = next(
            (path for each, path in given.items() if path and PACKAGES[each] == PACKAGES[name]), ""
        )
        python = given.get(name) or family or (sys.executable if find_spec(PACKAGES[name]) else "")
        if python:
            chosen[name] = python
        else:
            print(
                f"{name}: not installed here; name its interpreter with --peer {name}=PYTHON",
                file=sys.stderr,
            )
    return chosen


def measured(one: Subject, peers: dict[str, str], args: argparse.Namespace) -> str:
    """One model's table and what follows from it."""
    kinds = {effort: ["--config", args.config, "--effort", effort] for effort in args.efforts}
    kinds |= {preset: ["--config", preset, "--effort", "fast"] for preset in args.presets}
    kinds |= {
        label: shlex.split(options)
        for label, _, options in (item.partition("=") for item in args.onnxq)
    }
    rows = []
    for label, options in kinds.items():
        rows.append(
            of_onnxq(label, options, one, args.out / f"{one.name}.onnxq-{label}.onnx", args.rounds)
        )
        print(" ".join(rows[-1].cells()), file=sys.stderr, flush=True)
    for tool, python in peers.items():
        rows.append(of_peer(tool, python, one, args.out / f"{one.name}.{tool}.onnx", args.rounds))
        print(" ".join(rows[-1].cells()), file=sys.stderr, flush=True)
    also = dict(item.partition("=")[::2] for item in args.also)
    prefixes = [shlex.split(command) for command in also.values()]
    rows = [replace(row, also=tuple(one.score(row.target, prefix=each) if row.runs else Score() for each in prefixes))
            for row in rows]  # fmt: skip
    columns = [time_rows(rows, one, length, args.threads) for length in args.lengths]
    rows = [
        replace(row, speeds=tuple(column[k] for column in columns)) for k, row in enumerate(rows)
    ]
    size = f"MB (float {one.source.stat().st_size / 1e6:.2f})"
    head = [
        f"{one.name} (float {one.score().metric:.4f})",
        "metric",
        "SQNR dB",
        "seconds",
        "CPU s",
        "peak MB",
        size,
    ]
    head += [*also, *(f"× float{f' at {length}' if length else ''}" for length in args.lengths), ""]
    parts = [table([row.cells() for row in rows], head)]
    parts += [beside(rows, f"onnxq {effort}") for effort in args.efforts]
    if args.memory:
        parts += [memory(one, args.memory, effort, args.out) for effort in args.efforts]
    return "\n\n".join(parts)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="NAME or NAME:SAMPLES")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--config", default="ort-int8", help="preset or file for the efforts")
    parser.add_argument(
        "--efforts", nargs="*", default=["fast", "balanced"], choices=["fast", "balanced", "high"]
    )
    parser.add_argument(
        "--presets", nargs="*", default=[], help="more rows of onnxq: presets at effort fast"
    )
    parser.add_argument(
        "--onnxq", nargs="*", default=[], metavar="LABEL=OPTIONS", help="more rows of onnxq"
    )
    parser.add_argument(
        "--peers", nargs="*", default=list(DEFAULT), help=f"of {', '.join(PACKAGES)}"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="whose interpreter runs it",
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--memory", nargs="*", type=int, default=[], metavar="SAMPLES", help="such as 32 128 512"
    )
    parser.add_argument(
        "--lengths",
        nargs="*",
        type=int,
        default=[],
        help="of sequences in timing; 0: the samples' own",
    )
    parser.add_argument("--threads", type=int, default=1, help="in timing")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="LABEL=COMMAND",
        help="score under it as well",
    )
    parser.add_argument("--out", type=Path, default=Path("out/peers"))
    args = parser.parse_args()
    args.corpus, args.out = args.corpus.resolve(), args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    """Model by model; the tables go to the output folder too."""
    args = parse()
    peers = interpreters(args.peer, args.peers)
    parts = []
    for item in args.models:
        parts.append(measured(subject(item, args.corpus, args.out, args.samples), peers, args))
        print(parts[-1] + "\n", flush=True)
    (args.out / "peers.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
