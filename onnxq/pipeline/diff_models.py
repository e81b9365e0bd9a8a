"""Diff: a model and its quantized form in every engine, over samples, against tolerances."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import onnx

from onnxq.config import Config, check_number
from onnxq.data import load_data
from onnxq.engines.diff.compare import DiffRequest, DiffResult, compare_models
from onnxq.engines.diff.model import OFF, ON, TRT, Difference, Tolerances
from onnxq.engines.diff.results import INPUTS, RESULTS, find_inputs_beside, load_results, save_feeds
from onnxq.engines.diff.runs import ENGINES
from onnxq.errors import ConfigError, OutputError
from onnxq.files import prepare_folder, write_text
from onnxq.graph import GraphIndex, add_libraries, load_model, name_nodes, save_model
from onnxq.nearest import suggest_names
from onnxq.pipeline.quantize_model import Options, make_config
from onnxq.progress import Progress, silent
from onnxq.report import difference_json

ModelSource = str | Path | onnx.ModelProto
REPORT = "diff.json"
# Files that bisection may write for a run: a model and its inputs.
_PIECES = tuple(f"bisect-{run}{end}" for run in (OFF, ON, TRT) for end in (".onnx", ".onnx.data", ".inputs.json"))


def diff(
    model: ModelSource,
    quantized: ModelSource,
    data: object = None,
    config: Config | str | Path | None = None,
    *,
    engines: Sequence[str] = (),
    layers: bool = False,
    bisect: bool = False,
    top_k: int = 1,
    min_sqnr: float | None = None,
    min_cosine: float | None = None,
    max_abs: float | None = None,
    min_agreement: float | None = None,
    min_engines: float | None = None,
    load: Sequence[str | Path] = (),
    save: str | Path | None = None,
    keep: int = 16,
    samples: int | None = None,
    seed: int | None = None,
    threads: int = 1,
    memory_limit: int | None = None,
    ort_library: Sequence[str | Path] | str | Path = (),
    force: bool = False,
    progress: Progress = silent,
) -> Difference:
    """Compare a quantized model with its float one: in ONNX Runtime without and with optimizations, and in TensorRT.

    data: as for `quantize`; None takes the inputs saved beside the results of `load`, else synthetic ones. config:
    only its `data` and `runtime` sections are used. ort_library: shared libraries with the models' custom operators.
    engines: of "ort" and "trt"; empty takes ORT and, where it can run, TensorRT. layers: also every matching tensor
    inside. bisect: find the smallest subgraph in which an engine diverges. top_k, min_agreement: share of the K largest
    along the last axis that both name. min_engines: SQNR of every engine against ORT without optimizations. load:
    Polygraphy results of other runs on the same samples. save: a folder for results.json and inputs.json
    (Polygraphy's, of the first `keep` samples), diff.json and the pieces of bisection.

    Returns a Difference; `.holds` is False when a tolerance is unmet or an engine asked for could not run.
    Raises a subclass of OnnxqError for models that do not belong together, data that does not fit, missing packages.
    """
    _check_engines(engines)
    tolerances = Tolerances(
        min_sqnr=min_sqnr, min_cosine=min_cosine, max_abs=max_abs, min_agreement=min_agreement, min_engines=min_engines
    )  # fmt: skip
    _check_numbers(tolerances, memory_limit, top_k=(top_k, 1), keep=(keep, 1), threads=(threads, 0))
    folder = None if save is None else Path(save)
    request = DiffRequest(
        engines=tuple(engines), layers=layers, bisect=bisect, top_k=top_k, keep=keep if folder is not None else 0,
        threads=threads, memory_limit=memory_limit or DiffRequest.memory_limit, tolerances=tolerances,
    )  # fmt: skip
    with nullcontext() if folder is None else prepare_folder(folder, _list_files(folder, force)):
        chosen = make_config(config, None, Options(samples=samples, seed=seed, ort_library=ort_library))
        libraries = chosen.runtime.libraries
        with progress("reading the models"):
            loaded = [run for path in load for run in load_results(path)]
            named, other = (name_nodes(add_libraries(load_model(one).proto, libraries)) for one in (model, quantized))
        data = find_inputs_beside(load[0]) if data is None and load else data
        dataset = load_data(data, GraphIndex(named).inputs, chosen.data, named, progress=progress)
        result = compare_models(named, other, dataset, request, loaded=loaded, progress=progress)
        found = replace(result.difference, float_model=_path(model), quantized_model=_path(quantized))
        return found if folder is None else _save(found, result, folder, progress)


def _check_numbers(tolerances: Tolerances, memory_limit: int | None, **counts: tuple[int, int]) -> None:
    """ConfigError for a tolerance that is no number, or a count below its least. counts: (count, least) by name."""
    for name, value in vars(tolerances).items():
        check_number(name, value)
    for name, (count, least) in counts.items():
        check_number(name, count, low=least, whole=True)
    check_number("memory_limit", memory_limit, low=1, whole=True)


def _check_engines(engines: Sequence[str]) -> None:
    for name in engines:
        if name not in ENGINES:
            raise ConfigError(f"engine {name!r}", "there is no such engine", suggest_names(name, ENGINES), code="Q312")


def _path(source: ModelSource) -> str:
    return "" if isinstance(source, onnx.ModelProto) else str(source)


def _list_files(folder: Path, force: bool) -> list[str]:
    """The files that are written there. OutputError for a folder with earlier results, unless they may be replaced."""
    names = [RESULTS, INPUTS, REPORT, *_PIECES]
    there = [name for name in names if os.path.lexists(folder / name)]
    if there and not force:
        cause = f"holds {', '.join(there)} already"
        raise OutputError(folder, cause, "choose another folder, or pass `force=True`", code="Q601")
    return names


def _save(found: Difference, result: DiffResult, folder: Path, progress: Progress) -> Difference:
    """Write the results, as Polygraphy's files, so that `polygraphy run` can go on from them."""
    with progress("writing the results"):
        files = [*result.recorder.write(folder, overwrite=True)]
        bisections = []
        # An earlier run may have found more places than this one.
        for name in _PIECES:
            (folder / name).unlink(missing_ok=True)
        for piece in result.pieces:
            stem = f"bisect-{piece.bisection.run}"
            path = folder / f"{stem}.onnx"
            save_model(piece.proto, path, overwrite=True)
            save_feeds(folder / f"{stem}.inputs.json", piece.feeds)
            files += [str(path), str(folder / f"{stem}.inputs.json")]
            bisections.append(replace(piece.bisection, path=str(path)))
    files.append(str(folder / REPORT))
    count = len(result.recorder.inputs)
    notes = found.notes
    if count < found.samples:
        notes = (*notes, f"the outputs of the first {count} of {found.samples} samples were saved")
    # Last, with the list of all other files in it.
    found = replace(found, saved=tuple(files), bisections=tuple(bisections) or found.bisections, notes=notes)
    write_text(folder / REPORT, difference_json(found), overwrite=True)
    return found
