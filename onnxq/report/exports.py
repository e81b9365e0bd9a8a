"""A record in the forms of other tools: Markdown for a pull request, Mermaid, and Model Explorer's two files.

https://github.com/google-ai-edge/model-explorer/wiki describes both: node data, keyed by a tensor that the node makes,
so that they fit any adapter's graph; and a graph of our own, which needs no adapter.
"""

import json
from collections.abc import Iterator
from pathlib import PurePath

from onnxq.report.page import describe_effect, find_shade, list_loudest, list_tiles
from onnxq.report.record import OperatorRecord, ReportRecord

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
