"""`onnxq bench`: models built for one engine, their kernels, and their times side by side."""

from collections.abc import Iterator, Sequence

from onnxq.backends import find_engine, list_engines
from onnxq.backends.engine import Untimed
from onnxq.config import Command
from onnxq.engines.bench import Bench, BenchedModel, bench_models
from onnxq.errors import ConfigError, VerificationError
from onnxq.pipeline import Configuration, ModelSource, Overrides, open_run
from onnxq.pipeline.configuration import name_models
from onnxq.progress import Progress, silent
from onnxq.report import ResultFormat, Text, Values, pick_fields, terminal
from onnxq.runtime import CPU_KINDS, Latency
from onnxq.wording import format_counts

_UNTIMED = {
    Untimed.NO_GPU: "this machine has no NVIDIA GPU, or no driver: engines were built ahead of time for compute "
    "capability {capability}, and their kernels stand here alone",
    Untimed.OTHER_GPU: "engines were built for compute capability {capability}, whatever GPU this machine has",
    Untimed.NOT_BUILT: "no model was built",
}


def bench(
    models: Sequence[ModelSource] | ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    progress: Progress = silent,
) -> Bench:
    """Build models for an engine, list their kernels, and time them side by side: median, 99th percentile, rate.

    models: of one network, e.g. float32, float16 and quantized; the others are compared with the first. data: as for
    `quantize`, of which the first sample is timed; made-up inputs without. config, overrides: as for `quantize`, of
    which the sections `bench`, `data`, `verify` and `runtime` are used. `engine`: a name of
    `onnxq.backends.list_engines()`. TensorRT's run on the GPU of this machine, launched kernel by kernel and as a CUDA
    graph, timed by events of the GPU; ONNX Runtime runs on the CPU, or on `provider`. None: the one that the first plan
    in the models is for. Without a GPU TensorRT for RTX builds ahead of time for `compute_capability` ("8.6" if None)
    and times nothing, as that of an NPU does without one; `.untimed` says so.

    Returns a Bench with `.models`, each with its `.proof`, `.eager` and `.graph`; `.failed` has those that were not
    built. Raises a subclass of OnnxqError for models with different inputs, options that do not fit, and a GPU on
    which nothing runs.
    """
    sources = name_models(models)
    with open_run(next(iter(sources.values())), config, overrides, Command.BENCH) as chosen:
        options = chosen.bench
        fitting = [
            engine.name
            for engine in list_engines(foreign=False).values()
            if "provider" in engine.takes
        ]
        # Only one that the caller gave: that of a configuration may be meant for calibration.
        if (overrides or {}).get("provider") and options.engine not in (*fitting, None):
            cause = "is of ONNX Runtime, and another engine was asked for"
            raise ConfigError("provider", cause, "leave it out", code="Q317")
        engine = options.engine or (fitting[0] if chosen.runtime.provider else None)
        return bench_models(sources, data, chosen, engine, progress)


def _describe_model(bench: Bench, model: BenchedModel) -> Values:
    """A model for the JSON: times in milliseconds, kernels counted by kind and type."""
    proof = model.proof
    values = pick_fields(model, "name types reason") | {
        "build": None,
        "kernels": None,
        "moving": None,
        "kinds": {},
        "eager": _describe_latency(model.eager),
        "graph": _describe_latency(model.graph),
        "ratio": bench.ratio(model),
    }
    if proof is not None:
        values |= {
            "build": proof.build,
            "kernels": len(proof.kernels),
            "moving": len(proof.moving),
            "kinds": proof.by_kind(),
        }
    return values


def _describe_latency(latency: Latency | None) -> Values | None:
    if latency is None:
        return None
    # Without the single times, of which there are thousands.
    return pick_fields(latency, "median_ms min_ms p99_ms rounds threads per_second")


def _find_failed_model(bench: Bench) -> VerificationError | None:
    """The error of the first model that was not built, or not timed where others were; None without one."""
    if not bench.failed:
        return None
    model = bench.failed[0]
    if model.proof is not None and not model.built:
        build = model.proof.build
        cause = f"{build.state}: {build.reason}"
        return VerificationError(model.name, cause, "see `onnxq prove`", code="Q705")
    cause = f"was not timed: {model.reason}"
    return VerificationError(model.name, cause, "see the cause", code="Q710")


def _make_parts(bench: Bench, view: terminal.TextView) -> terminal.Parts:
    title = Text(terminal.format_count(len(bench.models), "model"), style="bold")
    yield title.join_facts(_list_facts(bench))
    yield _make_table(bench)
    yield Text()
    yield terminal.make_sheet(_make_lines(bench, view.verbose))


def _list_facts(bench: Bench) -> Iterator[str]:
    yield bench.version
    if bench.chosen:
        yield f"{bench.engine}: {bench.chosen}"
    # All models are timed with the same number of threads.
    latency = next((model.best for model in bench.models if model.best is not None), None)
    if latency is not None and "provider" in find_engine(bench.engine).takes:
        yield (
            bench.provider
            or f"{CPU_KINDS[bench.device]}, {terminal.format_threads(latency.threads)}"
        )
    elif bench.device:
        yield bench.device
    yield terminal.format_shapes(bench.shapes)


def _make_table(bench: Bench) -> terminal.RenderableType:
    columns = ["model", "heavy nodes", "kernels", "moving"]
    # A column that is empty for every model is left out.
    ways = [
        way
        for way in ("eager", "graph")
        if any(getattr(model, way) is not None for model in bench.models)
    ]
    for way in ways:
        prefix = "graph " if way == "graph" else ""
        columns += [f"{prefix}median", f"{prefix}p99", f"{prefix}runs/s"]
    if ways:
        columns.append("faster")
    rows = []
    for model in bench.models:
        proof = model.proof
        cells: list[object] = [model.name, format_counts(dict(model.types.most_common()))]
        cells += ["", ""] if proof is None else [len(proof.kernels), len(proof.moving)]
        for way in ways:
            latency = getattr(model, way)
            cells += (
                ("", "", "")
                if latency is None
                else (
                    terminal.format_milliseconds(latency.median_ms),
                    terminal.format_milliseconds(latency.p99_ms),
                    f"{latency.per_second:.0f}",
                )
            )
        if ways:
            cells.append(terminal.format_figure(bench.ratio(model), ".2f", "×"))
        rows.append(cells)
    return terminal.make_table(
        columns, rows, right=columns[2:], names=("model",), fold=("heavy nodes",)
    )


def _make_lines(bench: Bench, verbose: bool) -> terminal.SheetRows:
    proofs = [(model.name, model.proof) for model in bench.models if model.proof is not None]
    if bench.untimed is not None:
        capability = proofs[0][1].build.capability if proofs else ""
        yield "not timed", _UNTIMED[bench.untimed].format(capability=capability)
    for model in bench.models:
        proof = model.proof
        if proof is not None and not model.built:
            yield (
                str(proof.build.state),
                Text(f"{model.name}: {proof.build.reason}", style="bold red"),
            )
        elif model.reason:
            yield "not timed", f"{model.name}: {model.reason}"
        if verbose and proof is not None and model.built:
            build = proof.build
            kinds = format_counts(dict(proof.by_kind().most_common()))
            size = terminal.format_bytes(build.engine_bytes)
            yield (
                "kernels",
                f"{model.name}: built in {terminal.format_seconds(build.seconds)}, {size}; {kinds}",
            )
    yield "data", bench.data


FORM = ResultFormat[Bench](
    make_parts=_make_parts,
    derive=lambda bench: {"models": [_describe_model(bench, model) for model in bench.models]},
    find_fault=_find_failed_model,
)
