"""Qualcomm's compiler and emulator (onnxruntime-qnn on x86) in a child process, which may crash or never end."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

# Seconds a file, compiling and running; the slowest pattern of npu_cases.py takes two on an idle machine.
LIMIT = 60
# The chip that is compiled for: Snapdragon 8 Gen 3.
CHIP = {"htp_arch": "75", "soc_model": "57"}

Values = dict[str, np.ndarray]


@dataclass
class Reply:
    """What became of a file. graphs: as QNN got them. error: the text of the exception; "" where it ran."""

    error: str = ""
    results: list[np.ndarray] = field(default_factory=list)
    graphs: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""


class Emulator:
    """Compiles and runs one file after another; a new process after a crash, or a file that does not end."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """options: of the execution provider, beside or in place of those here."""
        self.options = dict(options)
        self.process: SpawnProcess | None = None
        self.connection: Connection

    def run(self, model: bytes, feeds: Values) -> Reply:
        """Compile without a fallback to the CPU, and run."""
        if self.process is None or not self.process.is_alive():
            self.connection, other = multiprocessing.Pipe()
            context = multiprocessing.get_context("spawn")
            self.process = context.Process(target=_serve, args=(other, self.options), daemon=True)
            self.process.start()
            other.close()
        self.connection.send((model, feeds))
        error = f"no end within {LIMIT} s"
        try:
            if self.connection.poll(LIMIT):
                return Reply(**self.connection.recv())
        except (EOFError, ConnectionError):
            error = "the compiler crashed"
        self.close()
        return Reply(error)

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, options: Mapping[str, str]) -> None:
    """The work of the child process."""
    with tempfile.TemporaryFile(mode="w+", errors="replace") as log:
        # The reasons of refusals are in the log only.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        import onnxruntime as ort
        import onnxruntime_qnn as qnn

        ort.register_execution_provider_library("QNNExecutionProvider", qnn.get_library_path())
        npu = [
            device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"
        ][:1]
        fixed = {"backend_path": qnn.get_qnn_htp_path(), **CHIP, "dump_json_qnn_graph": "1"}
        while True:
            try:
                model, feeds = connection.recv()
            except EOFError:
                return
            os.ftruncate(1, 0)
            os.lseek(1, 0, os.SEEK_SET)
            reply: dict[str, Any] = {}
            with tempfile.TemporaryDirectory() as folder:
                session_options = ort.SessionOptions()
                session_options.log_severity_level = 0
                session_options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
                session_options.add_provider_for_devices(
                    npu, {**fixed, "json_qnn_graph_dir": folder, **options}
                )
                try:
                    reply["results"] = ort.InferenceSession(model, session_options).run(None, feeds)
                except Exception as error:
                    reply["error"] = str(error)
                dumps = [
                    path
                    for path in Path(folder).glob("*.json")
                    if not path.stem.endswith("tensor_log")
                ]
                reply["graphs"] = [
                    json.loads(path.read_text(encoding="utf-8"))["graph"] for path in dumps
                ]
            log.seek(0)
            reply["log"] = log.read()
            connection.send(reply)
