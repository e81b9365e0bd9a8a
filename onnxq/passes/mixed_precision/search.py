"""The search that all choices between float, more bits and other scales share: predict, try, keep what pays.

A pass lists candidates, and predicts by switched pairs what each gains and by the planner what it costs. Its limits
say which are worth a trial; `take_paying` keeps those that pay together. The plan that comes of it is judged by the
runner (`judging.THRESHOLDS`), or, where somebody asked for an accuracy, by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onnxq.evaluation.compare import FloatOutputs, ModelErrors
from onnxq.evaluation.toggled import Setting, Switch, measure_settings, toggle_model
from onnxq.passes.assembly import write_pairs
from onnxq.passes.base import SampledContext
from onnxq.passes.state import PlacedState
from onnxq.plan import Plan
from onnxq.sites import NameSet, Role

# Names of operators, or of sites.
_Keys = NameSet


def take_paying(
    start: _Keys,
    candidates: Iterable[_Keys],
    pays: Callable[[_Keys], bool],
    change: Callable[[_Keys, _Keys], _Keys] = frozenset.union,
) -> _Keys:
    """The keys after each candidate in order has been taken, by `change`, where the result pays."""
    for candidate in candidates:
        changed = change(start, candidate)
        if pays(changed):
            start = changed
    return start


class SwitchedPlan:
    """A calibrated plan whose pairs and rounded constants can be switched off, to see what each costs the outputs."""

    def __init__(self, ctx: SampledContext, state: PlacedState, plan: Plan) -> None:
        self._ctx = ctx
        self._model = state.model
        with ctx.progress("putting every pair behind a switch"):
            pairs = write_pairs(state, plan)
            self.toggled = toggle_model(state.model, pairs, threads=ctx.config.verify.threads)

    def list_pairs(self, *roles: Role) -> list[Switch]:
        """The switches of these roles, in the order the model runs."""
        return [switch for switch in self.toggled.switches if switch.role in roles]

    def measure_settings(
        self, settings: Sequence[Setting], floats: FloatOutputs, title: str
    ) -> list[ModelErrors]:
        """The errors with these switches on and all others off, by setting."""
        ctx = self._ctx
        return measure_settings(
            self.toggled, floats, settings, progress=ctx.progress, title=title, crew=ctx.crew
        )

    def measure_alone(self) -> dict[str, float]:
        """Noise at the outputs of each pair of an activation alone, by the nodes that read it."""
        pairs = self.list_pairs(Role.ACTIVATION)
        floats = self._ctx.data.judge.float_outputs(self._model)
        settings = [frozenset([pair]) for pair in pairs]
        errors = self.measure_settings(settings, floats, "trying scales of each run")
        return {
            name: error.noise()
            for pair, error in zip(pairs, errors, strict=True)
            for name in pair.readers
        }
