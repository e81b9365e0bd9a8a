"""`onnxq perplexity`: language models side by side on a text."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from onnxq.config import Command, Config
from onnxq.data.synthetic import settle_caches
from onnxq.data.text import LENGTH, choose_windows, find_tokenizer, read_windows
from onnxq.evaluation.perplexity import (
    Decoder,
    LanguageScore,
    Perplexity,
    compare_texts,
    describe_errors,
    sum_errors,
    time_decoders,
)
from onnxq.files import AnyPath
from onnxq.graph import load_model, name_nodes, read_types, widen_model
from onnxq.pipeline import Configuration, ModelSource, Overrides, open_run
from onnxq.pipeline.configuration import name_models
from onnxq.progress import Progress, count_items, silent
from onnxq.report import ResultFormat, Text, terminal
from onnxq.runtime import CPU_KINDS, Session, detect_cpu

# Of each of the two timings.
_SECONDS = 8.0


def perplexity(
    models: Sequence[ModelSource] | ModelSource,
    data: AnyPath,
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
    sources = name_models(models)
    with open_run(next(iter(sources.values())), config, overrides, Command.PERPLEXITY) as chosen:
        return _measure(sources, Path(data), chosen, progress)


def _measure(
    sources: Mapping[str, ModelSource], path: Path, config: Config, progress: Progress
) -> Perplexity:
    options = config.perplexity
    seed = config.data.seed
    tokenizer = find_tokenizer(path, config.data)
    with progress("loading the models"):
        decoders = _load_decoders(sources, config)
    # A model exported for one length takes no other; caches make up for it.
    fixed = [
        model.parts.length
        for model in decoders
        if model.parts.length is not None and not model.caches
    ]
    length = min(fixed, default=config.data.sequence_length or LENGTH)
    count = config.data.samples
    windows = (
        read_windows(path, tokenizer, length)
        if count is None
        else choose_windows(path, tokenizer, length, count, seed)
    )
    with progress("reading the text", count) as task:
        errors = sum_errors(decoders, count_items(windows, task))
    texts = {}
    beginnings = choose_windows(path, tokenizer, length, options.prompts, seed)
    # Their first halves.
    prompts = [window.ids[: max(len(window.ids) // 2, 1)] for window in beginnings]
    if options.generate:
        texts = compare_texts(decoders, prompts, options.generate, progress)
    prompt = {}
    generation = {}
    if config.verify.latency:
        with progress("timing"):
            ids = next(choose_windows(path, tokenizer, length, 1, seed)).ids
            prompt, generation = time_decoders(decoders, ids, _SECONDS)
    scores = []
    for source, model in zip(sources.values(), decoders, strict=True):
        name = model.name
        scores.append(
            LanguageScore(
                name=name,
                size=load_model(source, lazy=True).size_bytes,
                caches=model.caches,
                generated=texts.get(name),
                prompt=prompt.get(name),
                generation=generation.get(name),
                **describe_errors(errors, name),
            )
        )
    return Perplexity(
        models=tuple(scores),
        windows=errors.windows,
        tokens=errors.tokens,
        length=length,
        prompts=len(prompts),
        generate=options.generate,
        threads=config.verify.threads,
        device=config.runtime.provider or detect_cpu(),
        data=path.name,
    )


def _load_decoders(sources: Mapping[str, ModelSource], config: Config) -> list[Decoder]:
    decoders = []
    runtime = config.runtime
    for name, source in sources.items():
        named = name_nodes(load_model(source, lazy=True).light)
        types = read_types(named)
        # ONNX Runtime hands numpy no bfloat16, and has hardly a kernel of it for the CPU.
        wide = onnx.TensorProto.BFLOAT16 in (types.computes, *types.interface.values())
        runnable = widen_model(named) if wide else source
        session = Session(
            runnable,
            threads=config.verify.threads,
            provider=runtime.provider,
            libraries=runtime.libraries,
        )
        # The session knows the sizes of caches less well than the nodes that read them.
        decoders.append(Decoder(session, name, settle_caches(session.inputs, named)))
    return decoders


def _make_parts(comparison: Perplexity, view: terminal.TextView) -> terminal.Parts:
    models = comparison.models
    machine = CPU_KINDS.get(comparison.device, comparison.device)
    title = Text(terminal.format_count(len(models), "model"), style="bold")
    yield title.join_facts((machine, terminal.format_threads(comparison.threads)))
    columns = ["model", "size", "perplexity", "bits/byte", "agreement", "KL"]
    generated = any(score.generated is not None for score in models)
    timed = any(score.prompt is not None for score in models)
    if generated:
        columns.append(f"of {comparison.generate} tokens")
    if timed:
        columns += ["prompt/s", "generated/s"]
    rows = [_make_row(score, timed) for score in models]
    yield terminal.make_table(columns, rows, right=columns[1:], names=("model",))
    yield Text()
    yield terminal.make_sheet(_make_lines(comparison, generated, timed))


def _make_row(score: LanguageScore, timed: bool) -> list[str]:
    cells = [
        score.name,
        terminal.format_bytes(score.size),
        f"{score.perplexity:.4g}",
        f"{score.bits_per_byte:.4f}",
        f"{100 * score.agreement:.2f}%",
        f"{score.divergence:.2g}",
    ]
    if score.generated is not None:
        cells.append(f"{score.generated:.1f}")
    if timed:
        cells += [_format_rate(score.prompt), _format_rate(score.generation)]
    return cells


def _format_rate(rate: float | None) -> str:
    return terminal.format_figure(rate, ".0f" if rate is not None and rate >= 10 else ".2g")


def _make_lines(comparison: Perplexity, generated: bool, timed: bool) -> terminal.SheetRows:
    windows = terminal.format_count(comparison.windows, "window")
    yield (
        "text",
        f"{comparison.data}: {comparison.tokens} tokens in {windows} of at most {comparison.length}",
    )
    first = comparison.models[0].name
    yield (
        "compared",
        f"agreement: the same likeliest token as {first}; KL: divergence from it, nats a token",
    )
    if generated:
        prompts = terminal.format_count(comparison.prompts, "prompt")
        yield "generated", f"tokens before the first that differs from {first}'s, mean of {prompts}"
    if timed:
        text = f"prompts of {comparison.length} tokens, and one token behind half as many"
        without_caches = ", ".join(score.name for score in comparison.models if not score.caches)
        if without_caches:
            text += f"; without caches, so that each costs a run of all before it: {without_caches}"
        yield "tokens/s", text


FORM = ResultFormat[Perplexity](make_parts=_make_parts)
