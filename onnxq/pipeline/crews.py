"""The crew that a configuration asks for: processes or a cluster, and the folder that interrupted work goes on from."""

from __future__ import annotations

from pathlib import Path

from onnxq.config import ScaleConfig
from onnxq.errors import ConfigError
from onnxq.runtime.crew import Crew
from onnxq.sites import Caution, Cautions
from onnxq.workers import Journal, Workers
from onnxq.workers.dask import DaskWorkers
from onnxq.workers.processes import ProcessWorkers

# The value of `resume` for a folder beside the model.
BESIDE = "auto"


def open_crew(config: ScaleConfig, model: object) -> Crew:
    """The crew, to be used in a `with` block; processes start with the first pieces.

    model: the path that the folder is named after, where none was named. Raises ConfigError for options that exclude
    each other, OutputError for a folder that cannot be made, WorkerError for a cluster that does not answer.
    """
    if config.dask and config.workers > 1:
        raise ConfigError("dask", "and workers were both given", "leave `workers=…` out", code="Q317")
    journal = Journal(_find_folder(config.resume, model)) if config.resume else None
    if config.dask:
        return Crew(DaskWorkers(config.dask, journal))
    return Crew(ProcessWorkers(config.workers, journal) if config.workers > 1 else Workers(journal))


def _find_folder(resume: str, model: object) -> Path:
    if resume != BESIDE:
        return Path(resume)
    if not isinstance(model, (str, Path)):
        raise ConfigError("resume", "the model is no file to be beside", "name a folder: `resume=…`", code="Q317")
    path = Path(model)
    return path.with_name(f"{path.name}.resume")


def describe_journal(crew: Crew) -> Cautions:
    """A line for pieces in the folder that this run had no use for."""
    journal = crew.workers.journal
    left = 0 if journal is None else journal.earlier - journal.used
    if journal is None or not left:
        return ()
    text = (
        f"{left} of {journal.earlier} finished pieces in {journal.folder} are of other weights, data, configurations "
        "or versions, and were not used"
    )
    return (Caution("W128", text),)
