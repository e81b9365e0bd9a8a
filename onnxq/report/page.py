"""The page of a record: one HTML file that asks for nothing else, prints, and holds the record itself."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from onnxq.report.pictures import draw_bars, draw_channels, draw_outputs, draw_strip
from onnxq.report.record import ELEMENT, RULE, Advice, OperatorRecord, ReportRecord, SiteRecord
from onnxq.report.terminal import format_bytes, format_decibel, format_scale

# Operators that are named above the tables.
_SHOWN = 5


def write_page(record: ReportRecord) -> str:
    """The page as HTML."""
    # Here, since only pages need it.
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("onnxq.report").joinpath("page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        record=record,
        rule=RULE,
        element=ELEMENT,
        json=record.to_json(),
        tiles=list(list_tiles(record)),
        strip=list(draw_strip(record.nodes)),
        loudest=list_loudest(record),
        effects=[describe_effect(entry) for entry in record.advice],
        runs=list(dict.fromkeys(run for output in record.outputs for run in output.runs)),
        scatters=[draw_outputs(output) for output in record.outputs if output.values],
        causes=[list(site.list_causes()) for site in record.sites],
        decibel=_format_db,
        percent=lambda share: "" if share is None else f"{100 * share:.1f} %",
        scales=_format_scales,
        draw_bars=draw_bars,
        draw_channels=draw_channels,
    )


def list_loudest(record: ReportRecord) -> list[tuple[OperatorRecord, list[str]]]:
    """The operators that add most noise, each with what is wrong with the tensors that it reads."""
    causes = {site.name: [f"{site.name}: {cause}" for cause in site.list_causes()] for site in record.sites}
    loudest = sorted((node for node in record.nodes if node.share), key=lambda node: -node.share)[:_SHOWN]
    return [(node, [cause for name in node.sites for cause in causes.get(name, ())]) for node in loudest]


def list_tiles(record: ReportRecord) -> Iterator[tuple[str, str]]:
    """The figures at the top, each with its label."""
    if record.sqnr_db is not None:
        yield "against float", _format_db(record.sqnr_db)
    if record.speed is not None:
        yield "the speed of float", f"{record.speed:.2f}x"
    if record.quantized_bytes:
        ratio = record.source_bytes / record.quantized_bytes
        yield f"of {format_bytes(record.source_bytes)}, {ratio:.1f}x smaller", format_bytes(record.quantized_bytes)
    for dtype, count in record.types.items():
        yield f"operators in {dtype}", str(count)


def describe_effect(advice: Advice) -> str:
    """The effect of a rule and its cost, in a sentence."""
    parts = [f"+{advice.gain_db:.1f} dB at the outputs"]
    if advice.size:
        parts.append(f"{format_bytes(advice.size)} larger")
    if advice.cost is not None:
        change = "slower" if advice.cost >= 0 else "faster"
        parts.append(f"the whole {100 * abs(advice.cost):.0f} % {change} by the costs of its target")
    return ", ".join(parts)


def _format_db(value: float | None) -> str:
    if value is None:
        return ""
    return "exact" if value >= 200 else format_decibel(value)


def _format_scales(site: SiteRecord) -> str:
    return format_scale(*site.scales) if site.scales else "at each run"
