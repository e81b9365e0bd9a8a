"""A record as a page, one HTML file that asks for nothing else, prints, and holds the record; and for other tools.

Its pictures are SVG, coloured by the classes of its style sheet, and need no script; the template draws them. The other
forms are Markdown for a pull request, Mermaid, and Model Explorer's two files, which
https://github.com/google-ai-edge/model-explorer/wiki describes: node data, keyed by a tensor that the node makes, so
that they fit any adapter's graph; and a graph of our own, which needs no adapter.
"""

import json
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import NamedTuple

from onnxq.report.record import (
    ELEMENT,
    MOST_DB,
    RULE,
    Advice,
    Figures,
    Measured,
    OperatorRecord,
    ReportRecord,
    SiteRecord,
    ValueBars,
)
from onnxq.report.terminal import format_bytes, format_decibel, format_scale

# Operators that are named above the tables.
_SHOWN = 5
# Operators in a row of the strip.
ROW = 240
# Units of a picture in a table.
_WIDTH = 120
_HEIGHT = 28


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
        row_size=ROW,
        loudest=list_loudest(record),
        effects=[describe_effect(entry) for entry in record.advice],
        runs=list(dict.fromkeys(run for output in record.outputs for run in output.runs)),
        causes=[list(site.list_causes()) for site in record.sites],
        decibel=_format_db,
        size=format_bytes,
        percent=lambda share: "" if share is None else f"{100 * share:.1f} %",
        scales=_format_scales,
        log=math.log,
        shade=find_shade,
        describe_operator=describe_operator,
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
        share = record.quantized_bytes / record.source_bytes
        yield (
            f"{share:.0%} of {format_bytes(record.source_bytes)}",
            format_bytes(record.quantized_bytes),
        )
    for dtype, count in record.types.items():
        noun = "operator" if count == 1 else "operators"
        yield f"{noun} in {dtype}", str(count)


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


def _format_db(value: Measured) -> str:
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


def describe_operator(node: OperatorRecord) -> list[str]:
    """The lines that a bar of the strip shows when it is pointed at."""
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
    return [*lines, *node.outputs]


class SmallPicture(NamedTuple):
    """A picture in a table. path: of SVG. band: left and right end of the range behind it, () for none."""

    label: str
    path: str
    band: Figures = ()


def draw_bars(bars: ValueBars, chosen: Sequence[float] = ()) -> SmallPicture:
    """A histogram, heights by their roots; the chosen range is a band behind it."""
    low = min([bars.low, *chosen])
    high = max([bars.high, *chosen])
    scale = _WIDTH / (high - low or 1.0)
    most = max(bars.counts, default=0) or 1
    heights = [math.sqrt(count / most) for count in bars.counts]
    path = _draw_steps(heights, (bars.low - low) * scale, (bars.high - low) * scale)
    label = f"{bars.low:.4g} to {bars.high:.4g}"
    if chosen:
        label += f"; range {chosen[0]:.4g} to {chosen[1]:.4g}"
    return SmallPicture(label, path, tuple((value - low) * scale for value in chosen))


def draw_channels(site: SiteRecord) -> SmallPicture:
    """The largest magnitude of each channel on a logarithmic scale of four decades."""
    largest = max(site.channels, default=0.0) or 1.0
    # A channel without values has a bar of no height.
    heights = [1 + math.log10(max(value / largest, 1e-4)) / 4 for value in site.channels]
    label = f"{min(site.channels, default=0):.3g} to {largest:.3g}"
    return SmallPicture(label, _draw_steps(heights, 0, _WIDTH))


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
    return f"{''.join(path)}V{_HEIGHT}z"


# Of the noise, by share: upper bounds and colours, from quiet to loud.
_STEPS = (
    (0.001, "#e8f3f1"),
    (0.01, "#b7dfd8"),
    (0.03, "#f6e3a1"),
    (0.1, "#f2b05e"),
    (1.0, "#e5484d"),
)
_SHADES = {"low": "#b7dfd8", "wide": "#b9cdf5", "float": "#f7d3ab", "none": "#e3e4e8"}


def write_markdown(record: ReportRecord) -> str:
    """A summary for a pull request."""
    tiles = ", ".join(f"{value} {label}" for label, value in list_tiles(record))
    lines = [
        f"### {_escape(record.title)}: {record.grade}",
        "",
        _escape(record.verdict),
        "",
        _escape(tiles),
        "",
    ]
    loudest = list_loudest(record)
    if loudest:
        lines += [
            "| operator | op | type | noise | alone | all but it |",
            "|---|---|---|---:|---:|---:|",
        ]
        lines += [_make_row(node) for node, _ in loudest]
        lines.append("")
    lines += [f"- {_escape(cause)}" for _, causes in loudest for cause in causes]
    lines.append("")
    for advice in record.advice:
        lines += [
            f"{len(advice.nodes)} in float: {describe_effect(advice)}",
            "",
            "```yaml",
            advice.rule,
            "```",
            "",
        ]
    return "\n".join(lines)


def _make_row(node: OperatorRecord) -> str:
    figures = (
        f"{db:.1f} dB" if db is not None else "" for db in (node.isolated_db, node.left_out_db)
    )
    share = f"{100 * node.share:.1f} %"
    cells = (f"`{_escape(node.name)}`", node.op, node.type, share, *figures)
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    """Text that Markdown takes for no table, tag or line of its own."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def write_mermaid(record: ReportRecord) -> str:
    """The operators as a Mermaid flowchart, coloured by the types that their kernels compute in."""
    lines = ["flowchart TD"]
    lines += [
        f"  classDef {shade} fill:{colour},stroke:#888,color:#111"
        for shade, colour in _SHADES.items()
    ]
    # Mermaid takes few names as they are: nodes get numbers.
    makers = {tensor: k for k, node in enumerate(record.nodes) for tensor in node.outputs}
    for k, node in enumerate(record.nodes):
        noise = f"<br/>{100 * node.share:.1f} % of the noise" if node.share >= _STEPS[1][0] else ""
        name = node.name.replace("&", "&amp;").replace('"', "#quot;").replace("<", "&lt;")
        label = f"{node.op} {name}<br/>{node.type}{noise}"
        lines.append(f'  n{k}["{label}"]:::{find_shade(node.type)}')
        lines += [
            f"  n{makers[tensor]} --> n{k}"
            for tensor in dict.fromkeys(node.inputs)
            if tensor in makers
        ]
    return "\n".join(lines) + "\n"


def write_node_data(record: ReportRecord) -> str:
    """Model Explorer's node data: for every tensor, the share of the noise that its operator adds, in percent."""
    results = {
        tensor: {"value": round(100 * node.share, 3)}
        for node in record.nodes
        for tensor in node.outputs
    }
    thresholds = [{"value": 100 * bound, "bgColor": colour} for bound, colour in _STEPS]
    return json.dumps({"main": {"name": "noise, %", "results": results, "thresholds": thresholds}})


def write_graph(record: ReportRecord) -> str:
    """Model Explorer's own graph of the operators, with all figures as attributes."""
    makers = {tensor: node.name for node in record.nodes for tensor in node.outputs}
    nodes = []
    for node in record.nodes:
        edges = [
            {"sourceNodeId": makers[tensor], "sourceNodeOutputId": "0", "targetNodeInputId": str(k)}
            for k, tensor in enumerate(node.inputs)
            if tensor in makers
        ]
        nodes.append(
            {
                "id": node.name,
                "label": node.op,
                # PyTorch's exporter names nodes by modules (/layer1/0/conv/Conv),
                # which become groups.
                "namespace": str(PurePath(node.name.lstrip("/")).parent).strip("."),
                "attrs": [{"key": key, "value": value} for key, value in _list_attributes(node)],
                "incomingEdges": edges,
                "outputsMetadata": [
                    {"id": str(k), "attrs": [{"key": "tensor_name", "value": tensor}]}
                    for k, tensor in enumerate(node.outputs)
                ],
            }
        )
    return json.dumps({"label": record.title, "graphs": [{"id": "main", "nodes": nodes}]})


def _list_attributes(node: OperatorRecord) -> Iterator[tuple[str, str]]:
    yield "type", node.type
    yield "kernel", node.kernel
    yield "share of the noise", f"{100 * node.share:.2f} %"
    for key, value in (
        ("alone", node.isolated_db),
        ("all but it", node.left_out_db),
        ("its result", node.own_db),
    ):
        if value is not None:
            yield key, f"{value:.1f} dB"
    if node.reason:
        yield "why float", node.reason
