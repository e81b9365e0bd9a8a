"""The page of a record: one HTML file that asks for nothing else, prints, and holds the record itself.

Its pictures are SVG, coloured by the classes of its style sheet, and need no script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from onnxq.report.record import (
    ELEMENT,
    MOST_DB,
    RULE,
    Advice,
    FrontPoint,
    OperatorRecord,
    OutputRecord,
    ReportRecord,
    SiteRecord,
    ValueBars,
)
from onnxq.report.terminal import format_bytes, format_decibel, format_scale

# Operators that are named above the tables.
_SHOWN = 5
# Operators in a row of the strip.
ROW = 240
# Units of the strip: of an operator, its bars and the ticks under them.
_STEP = 10
_BARS = 100
_TICKS = 14
_WIDTH = 120
_HEIGHT = 28
_SIDE = 220
_FRONT = 560


def write_page(record: ReportRecord) -> str:
    """The page as HTML."""
    # Here, since only pages need it.
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("onnxq.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
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
        front_picture=draw_front(record.front),
        causes=[list(site.list_causes()) for site in record.sites],
        decibel=_format_db,
        size=format_bytes,
        percent=lambda share: "" if share is None else f"{100 * share:.1f} %",
        scales=_format_scales,
        draw_bars=draw_bars,
        draw_channels=draw_channels,
    )


def list_loudest(record: ReportRecord) -> list[tuple[OperatorRecord, list[str]]]:
    """The operators that add most noise, each with what is wrong with the tensors that it reads."""
    causes = {
        site.name: [f"{site.name}: {cause}" for cause in site.list_causes()]
        for site in record.sites
    }
    loudest = sorted((node for node in record.nodes if node.share), key=lambda node: -node.share)[
        :_SHOWN
    ]
    return [
        (node, [cause for name in node.sites for cause in causes.get(name, ())]) for node in loudest
    ]


def list_tiles(record: ReportRecord) -> Iterator[tuple[str, str]]:
    """The figures at the top, each with its label."""
    if record.sqnr_db is not None:
        yield "against float", _format_db(record.sqnr_db)
    if record.speed is not None:
        yield "the speed of float", f"{record.speed:.2f}x"
    if record.quantized_bytes:
        ratio = record.source_bytes / record.quantized_bytes
        yield (
            f"of {format_bytes(record.source_bytes)}, {ratio:.1f}x smaller",
            format_bytes(record.quantized_bytes),
        )
    for dtype, count in record.types.items():
        yield f"operators in {dtype}", str(count)


def describe_effect(advice: Advice) -> str:
    """The effect of a rule and its cost, in a sentence."""
    exact = advice.gain_db >= MOST_DB / 2
    parts = ["exact outputs" if exact else f"+{advice.gain_db:.1f} dB at the outputs"]
    if advice.size:
        parts.append(f"{format_bytes(advice.size)} larger")
    if advice.cost is not None:
        change = "slower" if advice.cost >= 0 else "faster"
        parts.append(
            f"the whole {100 * abs(advice.cost):.0f} % {change} by the costs of its target"
        )
    return ", ".join(parts)


def _format_db(value: float | None) -> str:
    if value is None:
        return ""
    return "exact" if value >= MOST_DB else format_decibel(value)


def _format_scales(site: SiteRecord) -> str:
    return format_scale(*site.scales) if site.scales else "at each run"


def find_shade(dtype: str) -> str:
    """The class of the colour of a type: low, wide, float or none."""
    if not dtype:
        return "none"
    if "float" in dtype:
        return "low" if "float8" in dtype else "float"
    return "wide" if "16" in dtype else "low"


def draw_strip(nodes: Sequence[OperatorRecord]) -> Iterator[str]:
    """The network in the order it runs, a picture for every 240 operators.

    A bar's height is the root of an operator's share of the noise, its colour the type of the kernel, the tick under it
    stands for conversions in front.
    """
    most = max((node.share for node in nodes), default=0.0) or 1.0
    for start in range(0, len(nodes), ROW):
        row = nodes[start : start + ROW]
        # One scale for all rows, so that they can be compared.
        width = _STEP * (ROW if len(nodes) > ROW else len(row))
        parts = [_draw_operator(node, _STEP * k, most) for k, node in enumerate(row)]
        label = escape(f"{row[0].name} … {row[-1].name}")
        yield (
            f'<svg class="strip" viewBox="0 0 {width} {_BARS + _TICKS}" preserveAspectRatio="none" role="img" '
            f'aria-label="{label}">{"".join(parts)}</svg>'
        )


def _draw_operator(node: OperatorRecord, x: int, most: float) -> str:
    # Of an operator without noise a line is left, which has the colour and can be pointed at.
    height = max(2.0, _BARS * math.sqrt(node.share / most))
    lines = [
        f"{node.op} {node.name}",
        f"{node.type or 'no kernel of its own'} {node.kernel}".strip(),
    ]
    if node.isolated_db is not None:
        lines.append(f"{100 * node.share:.1f} % of the noise; alone {node.isolated_db:.1f} dB")
    if node.left_out_db is not None:
        lines.append(f"all but it {node.left_out_db:.1f} dB")
    if node.reason:
        lines.append(f"float: {node.reason}")
    if node.moves:
        lines.append(f"{node.moves} conversions or copies in front of it")
    lines += [f"{name}" for name in node.outputs]
    title = f"<title>{escape(chr(10).join(lines))}</title>"
    tick = (
        f'<rect class="move" x="{x}" y="{_BARS + 3}" width="{_STEP}" height="{_TICKS - 3}"/>'
        if node.moves
        else ""
    )
    return (
        f'<g>{title}<rect class="hit" x="{x}" y="0" width="{_STEP}" height="{_BARS}"/>'
        f'<rect class="{find_shade(node.type)}" x="{x + 1}" y="{_BARS - height:.1f}" width="{_STEP - 2}" '
        f'height="{height:.1f}"/>{tick}</g>'
    )


def draw_bars(bars: ValueBars, chosen: Sequence[float] = ()) -> str:
    """A histogram, heights by their roots; the chosen range is a band behind it."""
    low = min([bars.low, *chosen])
    high = max([bars.high, *chosen])
    scale = _WIDTH / (high - low or 1.0)
    most = max(bars.counts, default=0) or 1
    heights = [math.sqrt(count / most) for count in bars.counts]
    steps = _draw_steps(heights, (bars.low - low) * scale, (bars.high - low) * scale)
    band = ""
    if chosen:
        left, right = ((value - low) * scale for value in chosen)
        band = f'<rect class="band" x="{left:.0f}" width="{right - left:.0f}" height="{_HEIGHT}"/>'
    label = f"{bars.low:.4g} to {bars.high:.4g}"
    text = f"{label}; range {chosen[0]:.4g} to {chosen[1]:.4g}" if chosen else label
    return _wrap(band + steps, text)


def draw_channels(site: SiteRecord) -> str:
    """The largest magnitude of each channel on a logarithmic scale of four decades."""
    largest = max(site.channels, default=0.0) or 1.0
    # A channel without values has a bar of no height.
    heights = [1 + math.log10(max(value / largest, 1e-4)) / 4 for value in site.channels]
    label = f"{min(site.channels, default=0):.3g} to {largest:.3g}"
    return _wrap(_draw_steps(heights, 0, _WIDTH), label)


def _draw_steps(heights: Sequence[float], left: float, right: float) -> str:
    """ValueBars side by side as one path, in whole units: a page has a thousand of them. heights: from 0 to 1."""
    edges = [
        round(left + (right - left) * k / max(len(heights), 1)) for k in range(len(heights) + 1)
    ]
    # Neighbours of one height need no line between them.
    path = [f"M{edges[0]} {_HEIGHT}"]
    before = -1
    for height, start, end in zip(heights, edges, edges[1:], strict=False):
        top = round(_HEIGHT * (1 - height))
        path.append(f"h{end - start}" if top == before else f"V{top}h{end - start}")
        before = top
    return f'<path d="{"".join(path)}V{_HEIGHT}z"/>'


def draw_outputs(output: OutputRecord) -> str:
    """Float against quantized values of an output."""
    values = [*output.float_values, *output.values]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    scale = _SIDE / (high - low or 1.0)
    points = zip(output.float_values, output.values, strict=True)
    # Lines of no length, which round caps make dots.
    path = "".join(f"M{(a - low) * scale:.1f} {_SIDE - (b - low) * scale:.1f}h0" for a, b in points)
    label = f"{output.name}: float to the right, quantized upwards, {low:.4g} to {high:.4g}"
    line = f'<path class="diagonal" d="M0 {_SIDE}L{_SIDE} 0"/><path class="points" d="{path}"/>'
    return (
        f'<svg class="scatter" viewBox="-4 -4 {_SIDE + 8} {_SIDE + 8}" role="img"><title>{escape(label)}</title>'
        f"{line}</svg>"
    )


def draw_front(front: Sequence[FrontPoint]) -> str:
    """Models of a search: bytes to the right, dB upwards; "" without."""
    if not front:
        return ""
    places = [(math.log(point.bytes), point.sqnr_db) for point in front]
    (least, most), (low, high) = ((min(axis), max(axis)) for axis in zip(*places, strict=True))
    parts = []
    for point, (x, y) in zip(front, places, strict=True):
        kind = "float" if point.taken else "low" if point.holds else "none"
        text = f"{point.describe()}: {point.sqnr_db:.1f} dB, {format_bytes(point.bytes)}"
        right = _FRONT * (x - least) / ((most - least) or 1.0)
        down = _SIDE * (high - y) / ((high - low) or 1.0)
        dot = f'<circle class="{kind}" cx="{right:.1f}" cy="{down:.1f}" r="6"/>'
        parts.append(f"<g><title>{escape(text)}</title>{dot}</g>")
    box = f"-12 -12 {_FRONT + 24} {_SIDE + 24}"
    return f'<svg class="front" viewBox="{box}" role="img" aria-label="SQNR by size">{"".join(parts)}</svg>'


def _wrap(content: str, label: str) -> str:
    return f'<svg class="small" viewBox="0 0 {_WIDTH} {_HEIGHT}"><title>{escape(label)}</title>{content}</svg>'
