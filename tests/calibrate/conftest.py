"""Two processes, for all tests of this folder: each takes a second to start."""

from collections.abc import Iterator

import pytest

from onnxq.runtime.crew import Crew
from onnxq.workers.processes import ProcessWorkers


@pytest.fixture(scope="package")
def processes() -> Iterator[Crew]:
    with Crew(ProcessWorkers(2)) as crew:
        yield crew
