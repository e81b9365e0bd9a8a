"""Whether the notes of bits agree with the numbers in the graph, with each other, and with the nodes that are there."""

from collections.abc import Iterator
from dataclasses import replace

from onnxq.annotate.bits import (
    Disagreement,
    Inspection,
    Notes,
    PairInfo,
    list_specs,
    read_clip_bits,
    read_noted_bits,
    read_notes,
    read_numbers,
)
from onnxq.annotate.find import Chain, find_chains
from onnxq.annotate.read import ATTRIBUTE, describe_pair, inspect_model
from onnxq.annotate.write import find_contradiction, is_unbound
from onnxq.graph import GraphIndex, ModelSource, read_integer_products
from onnxq.plan import Plan


def check_notes(source: ModelSource, *, plan: Plan | None = None) -> Inspection:
    """Compare every note of bits with the graph, and with the other notes of its pair: `disagreements` of the result.

    plan: compared in the place of the one in the model's metadata. Raises ModelError for a file that cannot be read.
    """
    inspection = inspect_model(source)
    notes = read_notes(inspection.model, plan)
    index = GraphIndex(read_integer_products(inspection.model))
    return replace(inspection, disagreements=tuple(_find_disagreements(index, notes)))


def _find_disagreements(index: GraphIndex, notes: Notes) -> Iterator[Disagreement]:
    sites = set()
    for chain in find_chains(index):
        pair = describe_pair(index, chain, notes)
        sites.add(pair.site)
        # Bits -> the carriers that name them.
        noted: dict[int, dict[str, None]] = {}
        for node in chain.nodes:
            spec = notes.plan.get(node.name)
            values = {
                "model metadata": read_noted_bits(notes.by_node.get(node.name)),
                "node metadata": read_noted_bits(notes.own.get(node.name)),
                "attribute": node.attrs.get(ATTRIBUTE),
                "plan": None if spec is None else spec.bits,
            }
            for carrier, bits in values.items():
                if isinstance(bits, int):
                    noted.setdefault(bits, {})[f"{carrier} {bits}"] = None
        texts = {bits: ", ".join(names) for bits, names in noted.items()}
        for bits, text in texts.items():
            found, why = _find_fault(index, chain, pair, bits)
            if why:
                yield Disagreement(pair.name, text, found, why)
        if len(texts) > 1:
            first, *others = texts.values()
            yield Disagreement(
                pair.name,
                first,
                "; ".join(others),
                "the notes of one pair name different bits",
            )
    for name in notes.by_node.keys() - index.named.keys():
        text = f"model metadata {notes.by_node[name].get('bits')}"
        yield Disagreement(name, text, "no such node", "its node is gone")
    for site in notes.sites:
        if site.site not in sites and index.named.keys().isdisjoint(
            (site.dequantize, *list_specs((site,)))
        ):
            yield Disagreement(
                site.name, f"plan {site.spec.bits}", "no pair", "the plan's site has no pair"
            )


def _find_fault(index: GraphIndex, chain: Chain, pair: PairInfo, bits: int) -> tuple[str, str]:
    """The finding, and why the pair is not of so many bits; "" where it can be as noted."""
    problem = find_contradiction(pair, bits)
    if problem:
        return (
            f"{pair.levels[0]}..{pair.levels[1]}"
            if pair.levels and "levels" in problem
            else pair.storage,
            problem,
        )
    clipped = read_clip_bits(index, chain, read_numbers(index, chain)) if pair.clip else None
    if clipped not in (None, bits):
        return f"{clipped} bits", f"the levels that Clip {pair.clip} leaves are of {clipped} bits"
    unbound = "a label alone: nothing bounds the levels, so engines compute with all of the type's"
    return pair.storage, unbound if is_unbound(pair, bits) else ""
