"""`onnxq prove`: the kernels and types that a model gets in an engine; a later proof reads the JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from onnxq.annotate import read_model
from onnxq.backends import find_engine, list_engines
from onnxq.backends.engine import DevicePlacement, Kernel, Tensor
from onnxq.config import Command, Config
from onnxq.data import Dataset, load_data
from onnxq.engines.prove.proof import (
    INT8,
    INT16,
    INTEGERS,
    QUANTIZED,
    Proof,
    Requirement,
    SiteState,
)
from onnxq.engines.prove.prove import ProveRequest, open_output_folder, prove_model
from onnxq.engines.shapes import parse_shapes
from onnxq.errors import ConfigError, VerificationError
from onnxq.files import name_folder
from onnxq.graph import GraphIndex, add_libraries, name_nodes
from onnxq.pipeline import Configuration, ModelSource, OutputPath, Overrides, open_run
from onnxq.progress import Progress, silent
from onnxq.report import ResultFormat, Text, Values, pick_fields, terminal
from onnxq.report.sentences import format_cost, make_sums_tables, saturation_summary
from onnxq.sites import Caution, Names, Settings, drop_repeats
from onnxq.wording import format_counts, group_by_text, join_names

# Rows of a list without `verbose`, and nodes named in an error.
_SHOWN = 12
_NAMED = 5
# Fields in the JSON. `prove --compare` reads them back.
_NODE_FIELDS = "op type kernel kind types kernels reason"
_SITE_FIELDS = "role state rule readers unfused kernels reason"


def prove(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> Proof:
    """Build the engine, and find the kernel that every pair and every heavy node became, and the type it runs in.

    config, overrides: as for `quantize`, of which the sections `prove`, `data` and `runtime` are used. `engine`: a name
    of `onnxq.backends.list_engines()`; None for the first of the backend that the plan in the model is for, TensorRT
    for RTX where there is no plan, ONNX Runtime if there are integer operators; the proof's `chosen` says why. TensorRT
    for RTX builds ahead of time and needs no GPU, TensorRT builds for the GPU of this machine; of ONNX Runtime and
    browsers the optimized graph is read. Nodes that do not run in the type that `require`, (type, pattern) pairs, or
    `require_int8` asks for, and those that compute in a type of `forbid`, are in `.unmet`. out: folder for engine, log
    and list of kernels; force: overwrite
    them.

    With ONNX Runtime `.weights` has every int8 weight that meets 8-bit data, with the 16-bit sums that can overflow on
    CPUs without VNNI. data: as for `quantize`, to count how often that happens and the error it leaves each output,
    `.cost`.

    The build runs in a process of its own: a model that crashes the library, or is refused, gives a Proof that says so.
    Raises MissingDependencyError without the library, ConfigError for a pattern, engine or shape that fits nothing.
    """
    folder = name_folder(out)
    with open_run(model, config, overrides, Command.PROVE) as chosen:
        options = chosen.prove
        _check_libraries(options.engine, overrides or {})
        with open_output_folder(folder, options.engine, force=force):
            # The samples are read before the build, which may take minutes: a mistake in them shows at once.
            request = ProveRequest(
                options=options,
                runtime=chosen.runtime,
                dataset=None if data is None else _load_samples(model, data, chosen, progress),
                shapes=parse_shapes(options.shapes),
                save=folder,
                progress=progress,
            )
            return prove_model(model, request)


def _check_libraries(engine: str | None, overrides: Settings) -> None:
    """ConfigError for a library of another engine than the one asked for."""
    # Libraries in a configuration serve other commands, too, and are no reason to refuse.
    for name in ("ort_library", "plugin", "soc", "htp_arch"):
        if engine is None or not overrides.get(name) or name in find_engine(engine).takes:
            continue
        families = drop_repeats(
            other.family for other in list_engines().values() if name in other.takes
        )
        cause = f"is for {' or '.join(families)}, and another engine was asked for"
        raise ConfigError(name, cause, "leave it out", code="Q317")


def _load_samples(model: ModelSource, data: object, config: Config, progress: Progress) -> Dataset:
    """The samples that saturation is measured on."""
    with progress("reading the model"):
        named = name_nodes(
            add_libraries(read_model(model, lazy=True).light, config.runtime.libraries)
        )
    dataset = load_data(data, GraphIndex(named).inputs, config.data, named, progress=progress)
    return dataset.take(config.prove.samples, config.data.seed)


def _describe_proof(proof: Proof) -> Values:
    """Values of the JSON; nodes and sites are keyed by name."""
    return {
        "holds": proof.holds,
        "counts": {
            "kernels": len(proof.kernels),
            "moving": len(proof.moving),
            "kinds": proof.by_kind(),
            "ops": proof.by_op(),
        },
        "nodes": {node.node: pick_fields(node, _NODE_FIELDS) for node in proof.nodes},
        "sites": {site.site: pick_fields(site, _SITE_FIELDS) for site in proof.sites},
        "unmet": proof.unmet,
        "warnings": list(_find_warnings(proof)),
    }


def find_unmet_requirement(proof: Proof) -> VerificationError | None:
    """The error of an engine that was not built or of a requirement that does not hold; None when all holds."""
    build = proof.build
    if not proof.built:
        fix = "`out=…` keeps the log"
        if build.needs_plugin:
            fix = f"`plugin=…` takes the library that implements it; {fix}"
        elif build.fix:
            fix = f"{build.fix}; {fix}"
        elif build.reduced is None:
            fix = f"`reduce=True` finds the smallest part that does this; {fix}"
        subject = f"node {build.node}" if build.node else (proof.source or "the model")
        return VerificationError(subject, f"{build.state}: {build.reason}", fix, code="Q705")
    unmet = next((requirement for requirement in proof.requirements if requirement.unmet), None)
    if unmet is not None:
        names = join_names(unmet.unmet, _NAMED)
        option, fault = ("forbid", "in") if unmet.forbidden else ("require", "not in")
        fault = "not run as its pairs say" if unmet.dtype == QUANTIZED else f"{fault} {unmet.dtype}"
        cause = f"{fault} ({len(unmet.unmet)} in all)"
        if unmet.dtype == INTEGERS:
            fix = "quantize it, with a pair on each input and on the output"
            return VerificationError(f"`require_int=True`: {names}", cause, fix, code="Q706")
        first = proof.node(unmet.unmet[0])
        # Of a node that is quantized, the types that its kernel reads and writes.
        reason = first.reason or f"{first.node} runs in {first.type}: {first.types}"
        return VerificationError(f"`{option}='{unmet.dtype}'`: {names}", cause, reason, code="Q706")
    if proof.placement is not None and proof.scattered:
        left = proof.placement.left
        cause = f"{proof.placement.partitions} partitions run on the device, and {len(left)} nodes on the CPU"
        remedy = f"{left[0].subject}: {left[0].reason}; {left[0].fix}" if left else ""
        return VerificationError(
            f"`max_partitions={proof.max_partitions}`", cause, remedy, code="Q706"
        )
    if not proof.holds:
        fix = "quantize the float model with onnxq (saturation: avoid, the default), or with 7-bit weights"
        return VerificationError(
            "`require_exact=True`", saturation_summary(proof.weights), fix, code="Q707"
        )
    return None


def _find_warnings(proof: Proof) -> Iterator[Caution]:
    yield from proof.warnings
    summary = saturation_summary(proof.weights)
    # Where exact sums are required they are an unmet requirement, listed as such.
    if summary and not proof.require_exact:
        yield Caution(
            "W107",
            summary if proof.cost is not None else f"{summary}; `data=…` says how often they do",
        )


def _make_parts(proof: Proof, view: terminal.TextView) -> terminal.Parts:
    build = proof.build
    facts = [build.version or build.engine]
    if proof.chosen:
        facts.append(f"{build.engine}: {proof.chosen}")
    if build.capability:
        facts.append(f"compute capability {build.capability}")
    facts += [f"{name} {value}" for name, value in build.options.items()]
    facts.append(f"{build.state} in {terminal.format_seconds(build.seconds)}")
    yield terminal.make_title(proof.source).join_facts(facts)
    if proof.built:
        yield from _make_tables(proof, view)
    yield terminal.make_sheet(_make_rows(proof, view.verbose))


def _make_tables(proof: Proof, view: terminal.TextView) -> terminal.Parts:
    if proof.nodes:
        # In a shortened list those that are not int8 come first: they are what one looks for.
        nodes = (
            proof.nodes
            if view.top is None
            else sorted(proof.nodes, key=lambda node: node.type == INT8)
        )
        columns: Names = ("node", "op", "type", "kernel", "reads -> writes")
        yield from terminal.make_list(
            nodes,
            view,
            columns,
            "node op type kind types",
            names=("node", "kernel"),
            fold=("reads -> writes",),
        )
        yield Text()
    # That a pair fused is what it was written for.
    pairs = [site for site in proof.sites if view.verbose or site.state is not SiteState.FUSED]
    if pairs:
        columns = ("pair", "role", "state", "rule", "why")
        yield from terminal.make_list(
            pairs, view, columns, "site role state rule reason", names=("pair",), fold=columns[3:]
        )
        yield Text()
    yield from make_sums_tables(proof.weights, proof.cost, view)
    if view.verbose and proof.kernels:
        columns = ("kernel", "kind", "inputs", "constants", "outputs", "nodes")
        yield from terminal.make_list(
            proof.kernels, view, columns, _make_kernel_row, names=columns[:2], fold=columns[2:]
        )
        yield Text()


def _make_kernel_row(kernel: Kernel) -> Sequence[str]:
    types = map(_format_types, (kernel.inputs, kernel.weights, kernel.outputs))
    return kernel.name, kernel.kind, *types, " ".join(kernel.nodes)


def _format_types(tensors: Sequence[Tensor]) -> str:
    counts = Counter(tensor.dtype or "?" for tensor in tensors)
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.items())


def _make_rows(proof: Proof, verbose: bool) -> terminal.SheetRows:
    build = proof.build
    if not proof.built:
        blamed = f"node {build.node}: " if build.node else ""
        yield str(build.state), Text(f"{blamed}{build.reason}", style="bold red")
        if build.log:
            yield "last lines", build.log if verbose else build.log[-6:]
    if build.reduced is not None:
        reduced = build.reduced
        names = terminal.format_nodes(reduced.nodes, reduced.ops)
        effort = f"{reduced.builds} builds, {terminal.format_seconds(reduced.seconds)}"
        yield "smallest", f"{len(reduced.nodes)} nodes that do the same: {names} ({effort})"
    yield from _list_types(proof)
    # Why nodes stayed float, each reason once, with its number of nodes and the first of them.
    floating = (node for node in proof.nodes if node.reason)
    reasons = [
        f"{len(members)} {reason} ({_name_first([node.node for node in members])})"
        for reason, members in group_by_text(floating, lambda node: f"{node.op}: {node.reason}")
    ]
    yield "not int8", terminal.join_lines(reasons, verbose, _SHOWN)
    if proof.sites:
        states = Counter(site.state for site in proof.sites)
        yield "pairs", f"{len(proof.sites)}: {format_counts(states)}"
    if proof.kernels:
        kinds = format_counts(dict(proof.by_kind().most_common(None if verbose else _SHOWN)))
        moving = f"; {len(proof.moving)} of them only move or convert data" if proof.moving else ""
        yield "kernels", f"{len(proof.kernels)}: {kinds}{moving}"
    if build.engine_bytes:
        yield "engine", terminal.format_bytes(build.engine_bytes)
    if proof.placement is not None:
        yield from _list_placement(proof.placement, verbose)
    for requirement in proof.requirements:
        yield (
            ("forbidden" if requirement.forbidden else "required"),
            _describe_requirement(requirement),
        )
    if proof.require_exact:
        yield "required", f"exact: {saturation_summary(proof.weights) or 'no weight can overflow'}"
    if proof.cost is not None:
        yield "saturation", format_cost(proof.cost)
    if proof.compared:
        lines = [str(change) for change in proof.changes] or ["no difference"]
        yield f"since {PurePath(proof.compared).name}", lines
    yield "saved", build.saved


def _list_placement(placement: DevicePlacement, verbose: bool) -> terminal.SheetRows:
    """The number of partitions, and the nodes that the CPU runs, by reason."""
    yield "partitions", f"{placement.partitions} on the device"
    groups = group_by_text(
        placement.left, lambda one: "; ".join(filter(None, (one.reason, one.fix)))
    )
    lines = [
        f"{len(members)} left to it ({_name_first([one.subject for one in members])}): {why}"
        for why, members in groups
    ]
    yield "CPU", terminal.join_lines(lines, verbose, _SHOWN)


def _list_types(proof: Proof) -> terminal.SheetRows:
    """Numbers of nodes, by operator, that compute in int8, or only store their weights in a narrow type."""
    types = proof.by_op()
    stored = Counter(
        (node.op, node.stored) for node in proof.nodes if node.stored and INT8 not in node.computed
    )
    integers = [dtype for dtype in (INT8, INT16) if any(node.type == dtype for node in proof.nodes)]
    # That nothing runs in int8 is said, unless weights alone are stored narrow.
    for dtype in integers or ([INT8] if types and not stored else []):
        running = Counter(node.op for node in proof.nodes if node.type == dtype)
        products = (f"{op} {running[op]}/{counts.total()}" for op, counts in types.items())
        yield dtype, ", ".join(products)
    if stored:
        shares = (
            f"{op} {count}/{types[op].total()} in {dtype}" for (op, dtype), count in stored.items()
        )
        yield "weights", ", ".join(shares)


def _describe_requirement(requirement: Requirement) -> str:
    dtype = requirement.dtype
    unmet = ", ".join(requirement.unmet)
    count = len(requirement.unmet)
    total = len(requirement.nodes)
    if requirement.forbidden:
        return f"{dtype}: {count}/{total}: {unmet}" if unmet else f"{dtype}: none"
    manner = dtype if dtype == QUANTIZED else f"in {dtype}"
    text = f"{requirement.pattern or 'all nodes'}: {total - count}/{total} {manner}"
    return f"{text}; not: {unmet}" if unmet else text


def _name_first(names: Sequence[str]) -> str:
    return f"{names[0]}{', …' if len(names) > 1 else ''}"


FORM = ResultFormat[Proof](
    make_parts=_make_parts,
    list_warnings=_find_warnings,
    derive=_describe_proof,
    find_fault=find_unmet_requirement,
)
