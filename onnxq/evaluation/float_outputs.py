"""The float model's outputs, and other models scored against them: the one place where both run on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from onnxq.arrays import Array
from onnxq.data import Dataset
from onnxq.evaluation.agreement import AgreementSums
from onnxq.evaluation.compare import ModelErrors, ModelRunner, SampleErrors, measure_sample
from onnxq.evaluation.selections import find_selections
from onnxq.graph import ModelLike
from onnxq.graph.light import is_large_model
from onnxq.numerics.threads import count_cores, map_in_threads
from onnxq.runtime import Feeds, Session

# Bytes of outputs that are kept, 64 MiB; those of further samples are computed again.
_MOST_BYTES = 2**26

Run = Callable[[Feeds], Mapping[str, object]]


class FloatOutputs:
    """A float model on the samples of a data set, without optimizations.

    Models are compared with it in the form that `selections.take_choices` gives them.
    """

    def __init__(self, proto: ModelLike, samples: Dataset, *, threads: int = 0) -> None:
        self.proto, self.samples = proto, samples
        self.selections = find_selections(proto)
        self.threads = threads
        self._session: Session | None = None
        self._outputs: dict[int, dict[str, Array]] = {}
        self._bytes = 0

    def run(self, at: int, feeds: Feeds) -> dict[str, Array]:
        """Return the outputs, choices among them, for the sample at this position, whose inputs are `feeds`."""
        if at in self._outputs:
            return self._outputs[at]
        if self._session is None:
            exposed = self.selections.expose_choices(self.proto)
            self._session = Session(exposed, optimize=False, threads=self.threads)
        outputs: dict[str, Array] = self._session.run(feeds)
        # Sequences and maps have no size; they are rare, and small.
        self._bytes += sum(value.nbytes for value in outputs.values() if hasattr(value, "nbytes"))
        if self._bytes <= _MOST_BYTES:
            self._outputs[at] = outputs
            if len(self._outputs) == len(self.samples):
                self._session = None  # and the weights with it: nothing is left to run
        return outputs

    def score_runs(
        self, runs: Sequence[Run], positions: Iterable[int], *, threads: int = 0
    ) -> Iterator[tuple[int, SampleErrors]]:
        """Yield (number of the run, its errors) for each sample and, within it, each run, which takes the choices.

        threads: that run at a time; 0: as many as leave each session its own on all cores.
        """
        threads = threads or count_cores() // (self.threads or count_cores())
        scores = map_in_threads(lambda score: score(), self._list_scores(runs, positions), threads=threads)
        for number, errors in enumerate(scores):
            yield number % len(runs), errors
        # Until the next model comes: its session, and what calibrates it, have maps of the same weights.
        if is_large_model(self.proto):
            self._session = None

    def _list_scores(self, runs: Sequence[Run], positions: Iterable[int]) -> Iterator[Callable[[], SampleErrors]]:
        """The calls that make the errors of `score_runs`."""

        def score(run: Run, feeds: Feeds, exact: Mapping[str, Array], matched: Feeds) -> SampleErrors:
            return measure_sample(feeds, exact, run(matched))

        for at in positions:
            feeds = self.samples[at]
            exact = self.run(at, feeds)
            matched = self.selections.add_choices(feeds, exact)
            for run in runs:
                yield partial(score, run, feeds, exact, matched)

    def sum_runs(
        self,
        runs: Sequence[Run],
        *,
        limit: int | None = None,
        threads: int = 0,
        tick: Callable[[], None] = lambda: None,
    ) -> list[ModelErrors]:
        """Return the errors of each run over all samples. limit: the most samples to run. tick: called after each.

        threads: as of `score_runs`.
        """
        errors = [ModelErrors() for _ in runs]
        for k, sample in self.score_runs(runs, range(len(self.samples))[:limit], threads=threads):
            errors[k].add(sample)
            tick()
        return errors

    def measure(
        self, model: ModelRunner, *, limit: int | None = None, tick: Callable[[], None] = lambda: None
    ) -> ModelErrors:
        """Return the errors of a model, which takes the choices, over all samples; as of `sum_runs`."""
        return self.sum_runs([model.run], limit=limit, tick=tick)[0]


def add_own_choices(model: ModelLike, samples: Iterable[Feeds]) -> Iterator[Feeds]:
    """Each sample with what a float model chooses on it, as other forms of the model take it."""
    selections = find_selections(model)
    session = Session(selections.expose_choices(model), optimize=False) if selections.nodes else None
    for feeds in samples:
        yield dict(feeds) if session is None else selections.add_choices(feeds, session.run(feeds))


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

    def __init__(self, reference: ReferenceRunner, runner: ModelRunner) -> None:
        self.agreement = AgreementSums(reference.selections)
        self._reference, self._runner = reference, runner

    def run(self, feeds: Feeds, /) -> dict[str, Array]:
        """Return all outputs by name, without its own choices."""
        exact = self._reference.run(feeds)
        outputs = self._runner.run(self._reference.selections.add_choices(feeds, exact))
        self.agreement.update(exact, outputs)
        return outputs
