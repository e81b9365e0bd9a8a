"""Bits found, decided and written, and all notes of them taken out again."""

from onnxq.annotate.bits import NODE_PREFIX, Inspection, Records
from onnxq.annotate.forms import rewrite_pairs
from onnxq.annotate.operators import find_operators
from onnxq.annotate.read import ATTRIBUTE, drop_attribute, find_pairs, list_pair_nodes, read_named
from onnxq.annotate.sidecar import place_notes
from onnxq.annotate.write import Given, assign_bits, warn_unbound, write_named_bits
from onnxq.emit import BITS_KEY, PLAN_KEY
from onnxq.graph import ModelSource, drop_named, get_index, name_file, name_nodes, walk_all_nodes
from onnxq.graph.scopes import replace_items
from onnxq.plan import Plan
from onnxq.sites import Caution, Cautions

BITS_ATTRIBUTE_WARNING = Caution(
    "W105",
    "the attribute `bits` is in the file as asked: TensorRT's parser accepts it, "
    "onnx.checker and ONNX Runtime refuse to load such a file",
)
"""For every file that is written with such attributes."""


def annotate_model(
    source: ModelSource,
    *,
    given: Given = (),
    plan: Plan | None = None,
    rename: bool = False,
    bits_attribute: bool = False,
    beside: Records | None = None,
    form: str = "",
) -> Inspection:
    """Find the pairs of a model, decide their bits (`assign_bits`) and write them into a copy (`write_bits`).

    beside: notes of a sidecar, in the place of the model's own. form: of `FORMS`, which the pairs are rewritten in; ""
    leaves them as they are. The pairs that are returned have the names that their nodes have in the copy.
    Raises ModelError for a file that cannot be read, and the errors of `assign_bits`.
    """
    proto, warnings = read_named(source)
    had = sum(any(a.name == ATTRIBUTE for a in node.attribute) for node in list_pair_nodes(proto))
    found, lost = place_notes(proto, beside)
    pairs = assign_bits(found, given=given, plan=plan)
    stay: Cautions = ()
    if form:
        proto, pairs, stay = rewrite_pairs(proto, pairs, form)
    model, pairs = write_named_bits(proto, pairs, rename=rename, bits_attribute=bits_attribute)
    warnings += lost + stay + warn_unbound(pairs)
    if bits_attribute:
        warnings = (*warnings, BITS_ATTRIBUTE_WARNING)
    # Without the option the attribute is removed, since engines refuse it; its value stays as metadata.
    elif had:
        text = f"{had} attributes `bits` became metadata, so that every engine loads the file"
        warnings = (*warnings, Caution("W106", text))
    operators = find_operators(get_index(name_nodes(model)))
    return Inspection(
        model, pairs, source=name_file(source), warnings=warnings, operators=operators
    )


def strip_notes(source: ModelSource) -> Inspection:
    """A copy of the model without any note of bits, and its pairs as the graph alone shows them.

    Of the model's metadata the plan goes too, which says bits as well; entries that are not onnxq's stay. Raises
    ModelError for a file that cannot be read.
    """
    proto, warnings = read_named(source)
    model = name_nodes(proto)
    attributes = sum(drop_attribute(node) is not None for node in list_pair_nodes(model))
    keys = [entry.key for entry in model.metadata_props if entry.key in (BITS_KEY, PLAN_KEY)]
    noted = 0
    for node in walk_all_nodes(model):
        kept = [entry for entry in node.metadata_props if not entry.key.startswith(NODE_PREFIX)]
        noted += len(kept) < len(node.metadata_props)
        replace_items(node.metadata_props, kept)
    drop_named(model.metadata_props, keys, by="key")
    parts = [*keys, f"metadata of {noted} nodes", f"{attributes} attributes `bits`"]
    warnings = (*warnings, Caution("W106", f"taken out: {', '.join(parts)}"))
    return Inspection(model, find_pairs(model), source=name_file(source), warnings=warnings)
