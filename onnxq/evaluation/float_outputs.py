"""The outputs of the float model on some samples, by sample: it runs each of them once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from onnxq.data import Dataset
from onnxq.evaluation.accumulator import Array
from onnxq.evaluation.compare import ModelErrors, Runner
from onnxq.evaluation.selections import find_selections
from onnxq.graph import ModelLike
from onnxq.graph.light import is_large_model
from onnxq.runtime import Feeds, Session

# Bytes of outputs that are kept, 64 MiB; those of further samples are computed again.
_MOST_BYTES = 2**26

_Run = tuple[Feeds, dict[str, Array], dict[str, Array]]


class FloatOutputs:
    """A float model on the samples of a data set, without optimizations.

    Models are compared with it in the form that `selections.take_choices` gives them.
    """

    def __init__(self, proto: ModelLike, samples: Dataset, *, threads: int = 0) -> None:
        self.proto, self.samples = proto, samples
        self.selections = find_selections(proto)
        self.threads = threads
        self._session: Session | None = None
        self._kept: dict[int, dict[str, Array]] = {}
        self._bytes = 0

    def run(self, at: int, feeds: Feeds) -> dict[str, Array]:
        """Return the outputs, choices among them, for the sample at this position, whose inputs are `feeds`."""
        if at in self._kept:
            return self._kept[at]
        if self._session is None:
            exposed = self.selections.expose_choices(self.proto)
            self._session = Session(exposed, optimize=False, threads=self.threads)
        found: dict[str, Array] = self._session.run(feeds)
        # Sequences and maps have no size; they are rare, and small.
        self._bytes += sum(value.nbytes for value in found.values() if hasattr(value, "nbytes"))
        if self._bytes <= _MOST_BYTES:
            self._kept[at] = found
            if len(self._kept) == len(self.samples):
                self._session = None  # and the weights with it: nothing is left to run
        return found

    def measure(
        self, model: Runner, *, limit: int | None = None, tick: Callable[[], None] = lambda: None
    ) -> ModelErrors:
        """Return the errors of a model, which takes the choices, over all samples.

        limit: the most samples to run. tick: called after each.
        """
        errors = ModelErrors()
        for run in self._run_both(model, limit, tick):
            errors.update(*run)
        return errors

    def measure_each(self, model: Runner, *, tick: Callable[[], None] = lambda: None) -> list[ModelErrors]:
        """Return the errors of a model, which takes the choices, on each sample alone, in their order."""
        found = []
        for run in self._run_both(model, None, tick):
            found.append(ModelErrors())
            found[-1].update(*run)
        return found

    def _run_both(self, model: Runner, limit: int | None, tick: Callable[[], None]) -> Iterator[_Run]:
        for at, feeds in enumerate(islice(self.samples.samples(), limit)):
            exact = self.run(at, feeds)
            yield feeds, exact, model.run(self.selections.add_choices(feeds, exact))
            tick()
        # Until the next model comes: its session, and what calibrates it, have maps of the same weights.
        if is_large_model(self.proto):
            self._session = None


def add_own_choices(model: ModelLike, samples: Iterable[Feeds]) -> Iterator[Feeds]:
    """Each sample with what a float model chooses on it, as other forms of the model take it."""
    selections = find_selections(model)
    session = Session(selections.expose_choices(model), optimize=False) if selections.nodes else None
    for feeds in samples:
        yield dict(feeds) if session is None else selections.add_choices(feeds, session.run(feeds))
