"""Runners of a float model and of others that take its choices, for whatever runs both on the same samples."""

from __future__ import annotations

from collections.abc import Mapping

from onnxq.evaluation.accumulator import Array
from onnxq.evaluation.agreement import AgreementSums
from onnxq.evaluation.compare import Runner
from onnxq.evaluation.selections import find_selections
from onnxq.graph import ModelLike
from onnxq.runtime import Session

Feeds = Mapping[str, Array]


class ReferenceRunner:
    """A float model with its choices among its outputs. Asked again for the same inputs, by identity, it runs no more.

    optimize, threads, arena: of the session.
    """

    def __init__(self, model: ModelLike, *, optimize: bool = True, threads: int = 0, arena: bool = True) -> None:
        self.selections = find_selections(model)
        exposed = self.selections.expose_choices(model)
        self.session = Session(exposed, optimize=optimize, threads=threads, arena=arena)
        self._last: tuple[Feeds, dict[str, Array]] | None = None

    def run(self, feeds: Feeds, /) -> dict[str, Array]:
        """Return all outputs by name."""
        if self._last is None or self._last[0] is not feeds:
            self._last = feeds, self.session.run(feeds)
        return self._last[1]


class MatchedRunner:
    """Another model, as `take_choices` makes it of one, on the choices of the reference.

    agreement: of its own choices, over all runs.
    """

    def __init__(self, reference: ReferenceRunner, runner: Runner) -> None:
        self.agreement = AgreementSums(reference.selections)
        self._reference, self._runner = reference, runner

    def run(self, feeds: Feeds, /) -> dict[str, Array]:
        """Return all outputs by name, without its own choices."""
        exact = self._reference.run(feeds)
        outputs = self._runner.run(self._reference.selections.add_choices(feeds, exact))
        self.agreement.update(exact, outputs)
        return outputs
