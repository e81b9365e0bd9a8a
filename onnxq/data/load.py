"""Loading of data of every kind: paths, arrays, iterables and functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.config import DataConfig
from onnxq.data.dataset import Dataset, Unchosen
from onnxq.data.files import open_path
from onnxq.data.fit import check_dtype
from onnxq.data.scripts import DEFAULT_FUNCTION, call_function
from onnxq.data.sources import ArraySource, JoinedSource, Source
from onnxq.data.spool import name_arrays, spool_samples
from onnxq.data.synthetic import SAMPLES, make_synthetic
from onnxq.data.text import make_generated_samples
from onnxq.data.user_code import guard_user_code
from onnxq.errors import DataError
from onnxq.graph import ModelLike, ValueInfo
from onnxq.progress import Progress, silent

# The word for texts that a language model writes itself, in the place of a path.
GENERATED = "self-generated"


def load_data(
    source: Any,
    inputs: Sequence[ValueInfo],
    config: DataConfig | None = None,
    model: ModelLike | None = None,
    *,
    progress: Progress = silent,
) -> Dataset:
    """Load samples for a model with these inputs.

    source: a path (.npz, .npy, .pb, Polygraphy .json; a folder of these, of ONNX test data or of images; script.py or
    script.py:function; text, with config.tokenizer), "self-generated" for texts that a language model writes, a mapping
    {name: array of many samples}, one array, an iterable of {name: array} for one run each, a function returning any of
    these, a Dataset, or None for synthetic inputs.
    config.samples: at most so many. Of a source with more, a seeded choice; of a stream, the first.
    model: synthetic inputs are tried on it, to find sizes for its dynamic axes; it fills the caches of text.
    Raises DataError for samples that do not fit the model, if possible before any computation.
    """
    config = config or DataConfig()
    for value in () if model is None else model.graph.input:
        if (kind := value.type.WhichOneof("value")) in ("sequence_type", "map_type"):
            cause = f"is a {str(kind).removesuffix('_type')}, and samples hold tensors"
            fix = "export a model that takes tensors, and makes sequences of them itself"
            raise DataError(f"input {value.name!r}", cause, fix, code="Q206")
    if source is None:
        with progress("making up samples"):
            return make_synthetic(inputs, samples=config.samples or SAMPLES, seed=config.seed, model=model)
    if isinstance(source, Dataset):
        return _check_same_inputs(source, inputs)
    if not inputs:
        raise DataError("data", "the model has no inputs to feed", "leave `data=…` out", code="Q208")
    with progress("reading samples") as task:
        opened, title = _open_source(source, inputs, config, model, task.advance)
        return _choose_samples(opened, title, inputs, config)


def _open_source(
    source: Any, inputs: Sequence[ValueInfo], config: DataConfig, model: ModelLike | None, tick: Callable[[], None]
) -> tuple[Source, str]:
    if isinstance(source, (str, os.PathLike)):
        return _open_path(str(source), inputs, config, model, tick)
    # Before Iterable, which arrays of other libraries also are.
    if isinstance(source, np.ndarray) or (hasattr(source, "__array__") and not isinstance(source, Mapping)):
        return ArraySource(name_arrays(source, inputs, "data"), inputs, "data"), "array"
    if isinstance(source, Mapping):
        return ArraySource(name_arrays(source, inputs, "data"), inputs, "data"), "arrays"
    if isinstance(source, (list, tuple)):
        items = [(f"item {k}", name_arrays(one, inputs, f"item {k}")) for k, one in enumerate(source)]
        return JoinedSource([ArraySource(item, inputs, where, feed=True) for where, item in items]), "samples"
    if isinstance(source, Iterable):
        return spool_samples(source, inputs, "data", config.samples, tick), "stream"
    if callable(source):
        with guard_user_code(getattr(source, "__name__", "data")):
            given = source()
        return _open_source(given, inputs, config, model, tick)
    fix = "give a path, arrays by input name, or an iterable of {name: array}"
    raise DataError("data", f"is a {type(source).__name__}", fix, code="Q206")


def _open_path(
    text: str, inputs: Sequence[ValueInfo], config: DataConfig, model: ModelLike | None, tick: Callable[[], None]
) -> tuple[Source, str]:
    if text == GENERATED and model is not None and not os.path.exists(text):
        return spool_samples(
            make_generated_samples(inputs, config, model), inputs, "text", None, tick
        ), "text of its own"
    # The last colon: Windows paths have one of their own.
    script, colon, function = text.rpartition(":")
    if not (colon and script.endswith(".py")):
        script, function = text, DEFAULT_FUNCTION
    if not script.endswith(".py"):
        return open_path(Path(text), inputs, config, model, tick), Path(text).name
    path = Path(script)
    title = f"{path.name}:{function}"
    given = call_function(path, function)
    if isinstance(given, Dataset):
        fix = "return arrays by input name or an iterable of {name: array}"
        raise DataError(title, "returns a Dataset", fix, code="Q213")
    if isinstance(given, Iterable) and not isinstance(given, (str, os.PathLike, Mapping, list, tuple, np.ndarray)):
        return spool_samples(given, inputs, title, config.samples, tick), title
    return _open_source(given, inputs, config, model, tick)[0], title


def _choose_samples(source: Source, title: str, inputs: Sequence[ValueInfo], config: DataConfig) -> Dataset:
    """Choose the requested samples. The first one is read now, so that errors show before work begins."""
    total = len(source)
    if total == 0:
        raise DataError(title, "is empty: it has no samples", "give it at least one sample", code="Q203")
    raw = source.sample(0)
    notes = [check_dtype(np.asarray(raw[value.name]).dtype, value, source.name(0)) for value in inputs]
    # Without repetitions: a source of many files has its own remarks on dtypes already.
    source.notes = tuple(dict.fromkeys([*source.notes, *(note for note in notes if note)]))
    chosen: Sequence[int] = range(total)
    spare: Sequence[int] = ()
    if config.samples is not None and config.samples < total:
        order = np.random.default_rng(config.seed).choice(total, size=config.samples, replace=False)
        chosen = sorted(int(i) for i in order)
        spare = Unchosen(total, chosen)
    dataset = Dataset(source, inputs, chosen, spare=spare, title=title)
    dataset[0]
    return dataset


def _check_same_inputs(dataset: Dataset, inputs: Sequence[ValueInfo]) -> Dataset:
    theirs, ours = ([value.name for value in some] for some in (dataset.inputs, inputs))
    if set(theirs) != set(ours):
        cause = f"was loaded for inputs {', '.join(theirs)}; the model has {', '.join(ours)}"
        raise DataError("data", cause, "load it with this model's inputs", code="Q208")
    return dataset
