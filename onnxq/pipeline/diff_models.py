"""Diff: a model and its quantized form in every engine, over samples, against tolerances."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import onnx

from onnxq.backends import list_runnable
from onnxq.config import Command
from onnxq.data import load_data
from onnxq.engines.diff.compare import DiffRequest, DiffResult, compare_models
from onnxq.engines.diff.model import OFF, ON, Difference, Tolerances
from onnxq.engines.diff.results import INPUTS, RESULTS, find_inputs_beside, load_results, save_feeds
from onnxq.errors import OutputError
from onnxq.files import name_folder, prepare_folder, write_text
from onnxq.graph import GraphIndex, add_libraries, load_model, name_nodes, save_model
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.progress import Progress, silent
from onnxq.report.diffs import difference_json

REPORT = "diff.json"


def diff(
    model: ModelSource,
    quantized: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Difference:
    """Compare a quantized model with its float one: in ONNX Runtime without and with optimizations, and in TensorRT.

    data: as for `quantize`; None takes the inputs saved beside the results of `load`, else synthetic ones.
    config, overrides: as for `quantize`, of which the sections `diff`, `data`, `verify` and `runtime` are used; its
    `provider` runs ONNX Runtime with optimizations, and without them, as the reference, the CPU does.
    out: a folder for results.json and inputs.json (Polygraphy's, of the first `keep` samples), diff.json and the pieces
    of bisection; force: overwrite earlier results there.

    Returns a Difference; `.holds` is False when a tolerance is unmet or an engine asked for could not run.
    Raises a subclass of OnnxqError for models that do not belong together, data that does not fit, missing packages.
    """
    folder = name_folder(out)
    guarded = nullcontext() if folder is None else prepare_folder(folder, _list_files(folder, force))
    with guarded, open_run(model, config, overrides, Command.DIFF) as chosen:
        wanted = chosen.diff
        request = DiffRequest(
            engines=wanted.engines, layers=wanted.layers, bisect=wanted.bisect, top_k=wanted.top_k,
            keep=wanted.keep if folder is not None else 0, threads=chosen.verify.threads,
            memory_limit=chosen.data.memory_limit or DiffRequest.memory_limit,
            provider=chosen.runtime.provider, plugins=chosen.runtime.plugins,
            tolerances=Tolerances(**{field.name: getattr(wanted, field.name) for field in fields(Tolerances)}),
        )  # fmt: skip
        with progress("reading the models"):
            loaded = [run for path in wanted.load for run in load_results(path)]
            libraries = chosen.runtime.libraries
            named, other = (name_nodes(add_libraries(load_model(one).proto, libraries)) for one in (model, quantized))
        data = find_inputs_beside(wanted.load[0]) if data is None and loaded else data
        dataset = load_data(data, GraphIndex(named).inputs, chosen.data, named, progress=progress)
        result = compare_models(named, other, dataset, request, loaded=loaded, progress=progress)
        found = replace(result.difference, float_model=_path(model), quantized_model=_path(quantized))
        return found if folder is None else _save(found, result, folder, progress)


def _path(source: ModelSource) -> str:
    return "" if isinstance(source, onnx.ModelProto) else str(source)


def _list_pieces() -> list[str]:
    """The files that bisection may write for a run: a model and its inputs."""
    runs = (OFF, ON, *list_runnable())
    return [f"bisect-{run}{end}" for run in runs for end in (".onnx", ".onnx_data", ".inputs.json")]


def _list_files(folder: Path, force: bool) -> list[str]:
    """The files that are written there. OutputError for a folder with earlier results, unless they may be replaced."""
    names = [RESULTS, INPUTS, REPORT, *_list_pieces()]
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
        for name in _list_pieces():
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
