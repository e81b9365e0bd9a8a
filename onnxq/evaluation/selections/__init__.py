"""Selections: nodes where a float model chooses by values that it computes, and models judged on the same choices.

TopK, ArgMax, NonMaxSuppression, or a comparison in front of NonZero give positions. Two candidates that differ by less
than rounding does may change places, and from there on the rows of two outputs have nothing to do with each other: a
detector that lost nothing has 5 dB. So models are compared in a judged form. The float model gives its choices as
outputs; any other model takes them as inputs, and gives its own as outputs. Both give the values chosen by as outputs.
All rows then match, those of decoders and experts behind a choice too. Choices inside the bodies of If, Loop and Scan
come out, and go in, as one tensor of all iterations; those that cannot be one tensor are told and not followed.
"""

from dataclasses import dataclass

from onnxq.arrays import Arrays
from onnxq.evaluation.selections.forms import make_form
from onnxq.evaluation.selections.search import (
    SelectedNodes,
    Selection,
    explain_missing,
    name_own,
    search_choices,
    write_out_routers,
)
from onnxq.graph import ModelLike, inline_functions, name_nodes, walk_graphs
from onnxq.graph.light import bare_proto, cache_on_model
from onnxq.sites import NameSet, TensorId

__all__ = [
    "Selection",
    "Selections",
    "explain_missing",
    "find_selections",
    "name_own",
]


@dataclass(frozen=True)
class Selections:
    """The selections of a float model, in the order they run.

    settled: outputs that the choices alone decide. own: those that every model makes by itself, since they can be
    neither seen nor given.
    """

    nodes: SelectedNodes = ()
    settled: NameSet = frozenset()
    own: SelectedNodes = ()

    def expose_choices(self, model: ModelLike) -> ModelLike:
        """The float model with its choices, and the values they were made by, as further outputs."""
        return make_form(_spell_out(model), self.nodes, given=False) if self.nodes else model

    def take_choices(self, model: ModelLike) -> ModelLike:
        """Another form of the model, with the float model's choices as inputs.

        Its own become outputs, as do the values they were made by; `settled` outputs go. A choice that it has no tensor
        for is an input that nothing reads: what is behind it is its own then.
        """
        return (
            make_form(_spell_out(model), self.nodes, self.settled, given=True)
            if self.nodes
            else model
        )

    def add_choices(self, feeds: Arrays, outputs: Arrays) -> Arrays:
        """The inputs of another model. outputs: of the float model, on the same sample."""
        if not self.nodes:
            return feeds
        choices = {name: outputs[name] for node in self.nodes for name, _ in node.choices}
        return {**feeds, **choices}

    def list_missing(self, model: ModelLike) -> SelectedNodes:
        """Those that another model is not given: it does not make their tensors, or they are its own in every model."""
        if not self.nodes:
            return self.own
        graphs = walk_graphs(bare_proto(name_nodes(_spell_out(model))).graph)
        tensors = {
            str(TensorId(name, scope))
            for scope, graph in graphs
            for node in graph.node
            for name in node.output
        }
        lacking = (
            selection
            for selection in self.nodes
            if not tensors.issuperset(name for name, _ in selection.choices)
        )
        return (*lacking, *self.own)


@cache_on_model
def find_selections(model: ModelLike) -> Selections:
    """The selections of a float model."""
    nodes, settled = search_choices(_spell_out(model))
    followed = tuple(node for node in nodes if not node.obstacle)
    return Selections(followed, settled, tuple(node for node in nodes if node.obstacle))


def _spell_out(model: ModelLike) -> ModelLike:
    """The model with all its choices made by operators that it shows, also those of functions and fused operators."""
    return write_out_routers(inline_functions(model))
