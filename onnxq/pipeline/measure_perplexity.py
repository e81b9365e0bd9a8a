"""perplexity(): language models side by side on a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx

from onnxq.config import Command, Config, DataConfig
from onnxq.data.text import LENGTH, Tokenizer, Window, choose_windows, find_tokenizer, read_windows
from onnxq.errors import ConfigError
from onnxq.evaluation.perplexity import (
    Decoder,
    LanguageScore,
    Perplexity,
    choose_prompts,
    compare_texts,
    describe_errors,
    sum_errors,
    time_decoders,
)
from onnxq.graph.storage.external import is_external, walk_tensors
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.progress import Progress, count_items, silent
from onnxq.runtime import Session, detect_cpu

# Of each of the two timings.
_SECONDS = 8.0


def perplexity(
    models: Sequence[ModelSource] | ModelSource,
    data: str | Path,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    progress: Progress = silent,
) -> Perplexity:
    """Run language models on a text: perplexity, bits a byte, agreement with the first model, tokens a second.

    models: decoders of one vocabulary, e.g. float and quantized, with caches of keys and values or without; the first
    is the one that others are compared with. data: a text file; the override `tokenizer` names the folder with
    tokenizer.json, or is "bytes". It is read in windows of `sequence_length` tokens, one behind the other; `samples`:
    so many, spread over the text. `generate`: tokens to continue `prompts` beginnings of windows by, greedily.

    Returns a Perplexity, with a LanguageScore for each model in `.models`.
    Raises a subclass of OnnxqError for a text or tokenizer that cannot be read, and a model that gives no logits.
    """
    given = [models] if isinstance(models, (str, Path, onnx.ModelProto)) else list(models)
    if not given:
        raise ConfigError("models", "none was given", "give at least one", code="Q304")
    with open_run(given[0], config, overrides, Command.PERPLEXITY) as chosen:
        return _measure(given, Path(data), chosen, progress)


def _measure(given: Sequence[ModelSource], path: Path, config: Config, progress: Progress) -> Perplexity:
    wanted, seed = config.perplexity, config.data.seed
    tokenizer = find_tokenizer(path, config.data)
    with progress("loading the models"):
        decoders = _load_decoders(given, config)
    fixed = [one.parts.length for one in decoders if one.parts.length is not None and not one.caches]
    length = min(fixed, default=config.data.sequence_length or LENGTH)
    with progress("reading the text", config.data.samples) as task:
        errors = sum_errors(decoders, count_items(_list_windows(path, tokenizer, length, config.data), task))
    texts: dict[str, float] = {}
    prompts = choose_prompts(choose_windows(path, tokenizer, length, wanted.prompts, seed))
    if wanted.generate:
        texts = compare_texts(decoders, prompts, wanted.generate, progress)
    prompt, generation = {}, {}
    if config.verify.latency:
        with progress("timing"):
            ids = next(choose_windows(path, tokenizer, length, 1, seed)).ids
            prompt, generation = time_decoders(decoders, ids, _SECONDS)
    scores = [
        LanguageScore(
            name=one.name, size=_count_bytes(source), caches=one.caches, generated=texts.get(one.name),
            prompt=prompt.get(one.name), generation=generation.get(one.name), **describe_errors(errors, one.name),
        )
        for source, one in zip(given, decoders, strict=True)
    ]  # fmt: skip
    return Perplexity(
        models=tuple(scores), windows=errors.windows, tokens=errors.tokens, length=length, prompts=len(prompts),
        generate=wanted.generate, threads=config.verify.threads, device=config.runtime.provider or detect_cpu(),
        data=path.name,
    )  # fmt: skip


def _load_decoders(given: Sequence[ModelSource], config: Config) -> list[Decoder]:
    """The models with names of their own."""
    found: dict[str, Decoder] = {}
    runtime = config.runtime
    for k, source in enumerate(given):
        name = f"model {k + 1}" if isinstance(source, onnx.ModelProto) else str(source)
        name = f"{name} ({k + 1})" if name in found else name
        session = Session(source, threads=config.verify.threads, provider=runtime.provider, libraries=runtime.libraries)
        found[name] = Decoder(session, name)
    return list(found.values())


def _count_bytes(source: ModelSource) -> int:
    """Bytes of a model and of the files beside it that hold its weights."""
    if isinstance(source, onnx.ModelProto):
        return int(source.ByteSize())
    path = Path(source)
    stored = filter(is_external, walk_tensors(onnx.load(path, load_external_data=False)))
    files = {entry.value for tensor in stored for entry in tensor.external_data if entry.key == "location"}
    return sum(file.stat().st_size for file in (path, *(path.parent / name for name in files)))


def _list_windows(path: Path, tokenizer: Tokenizer, length: int, config: DataConfig) -> Iterator[Window]:
    if config.samples is None:
        return read_windows(path, tokenizer, length)
    return choose_windows(path, tokenizer, length, config.samples, config.seed)
