"""Language models on a text, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rich.console import RenderableType

from onnxq.evaluation.perplexity import LanguageScore, Perplexity
from onnxq.report.columns import Text
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.terminal import View, format_bytes, make_sheet, make_table, show_result
from onnxq.runtime import CPU_KINDS


def perplexity_json(found: Perplexity) -> str:
    """Convert the comparison to one strict JSON document: sizes in bytes, rates in tokens a second."""
    return to_json({"schema": SCHEMA, **{field.name: getattr(found, field.name) for field in fields(found)}})


def show_perplexity(found: Perplexity, view: View = View()) -> None:
    """Print the models as a table."""
    show_result(view, lambda: perplexity_json(found), _make_parts(found), ())


def _make_parts(found: Perplexity) -> Iterator[RenderableType]:
    count = f"{len(found.models)} model{'s' if len(found.models) > 1 else ''}"
    machine = CPU_KINDS.get(found.device, found.device)
    threads = f"{found.threads or 'all'} thread{'' if found.threads == 1 else 's'}"
    yield Text(count, style="bold").join_text(f"  ({machine}, {threads})", style="dim")
    columns = ["model", "size", "perplexity", "bits/byte", "agreement", "KL"]
    generated = any(one.generated is not None for one in found.models)
    timed = any(one.prompt is not None for one in found.models)
    columns += [f"of {found.generate} tokens"] * generated + ["prompt/s", "generated/s"] * timed
    rows = [_make_row(one, generated, timed) for one in found.models]
    yield make_table(columns, rows, right=columns[1:], names=("model",))
    yield Text("")
    yield make_sheet(_make_lines(found, generated, timed))


def _make_row(one: LanguageScore, generated: bool, timed: bool) -> tuple[str, ...]:
    cells = [
        one.name, format_bytes(one.size), f"{one.perplexity:.4g}", f"{one.bits_per_byte:.4f}",
        f"{100 * one.agreement:.2f}%", f"{one.divergence:.2g}",
    ]  # fmt: skip
    cells += [f"{one.generated:.1f}"] if generated and one.generated is not None else []
    cells += [_format_rate(one.prompt), _format_rate(one.generation)] if timed else []
    return tuple(cells)


def _format_rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _make_lines(found: Perplexity, generated: bool, timed: bool) -> Iterator[tuple[str, RenderableType]]:
    windows = f"{found.windows} window{'s' if found.windows > 1 else ''}"
    yield "text", Text(f"{found.data}: {found.tokens} tokens in {windows} of at most {found.length}")
    first = found.models[0].name
    yield "compared", Text(f"agreement: the same likeliest token as {first}; KL: divergence from it, nats a token")
    if generated:
        prompts = f"{found.prompts} prompt{'s' if found.prompts > 1 else ''}"
        yield "generated", Text(f"tokens before the first that differs from {first}'s, mean of {prompts}")
    if timed:
        alone = [one.name for one in found.models if not one.caches]
        told = f"prompts of {found.length} tokens, and one token behind half as many"
        more = f"; without caches, so that each costs a run of all before it: {', '.join(alone)}" if alone else ""
        yield "tokens/s", Text(told + more)
