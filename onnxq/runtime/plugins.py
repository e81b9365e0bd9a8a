"""Sessions of execution providers that come as plugins: a library of another package, registered at run time."""

from pathlib import Path
from typing import Any

from onnxq.sites import EngineOptions

# Of ONNX Runtime's log: warnings and what is worse.
_WARNING = 2


def find_plugin_device(provider: str, library: str) -> Any:
    """The first device of a provider, whose library is registered; once a process. Raises errors of ONNX Runtime."""
    import onnxruntime

    onnxruntime.register_execution_provider_library(provider, library)
    found = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider]
    if not found:
        raise RuntimeError("its library offers no device")
    return found[0]


def open_plugin_session(
    device: Any, model: Path, settings: EngineOptions, entries: EngineOptions | None = None
) -> Any:
    """A session of ONNX Runtime on a device of a plugin, and on the CPU for nodes that it does not take.

    settings: of the provider. entries: of the session. A run that fails is not repeated on the CPU. Raises errors of
    ONNX Runtime, which have no common kind.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _WARNING
    for name, value in (entries or {}).items():
        options.add_session_config_entry(name, value)
    options.add_provider_for_devices([device], dict(settings))
    session = onnxruntime.InferenceSession(str(model), options)
    session.disable_fallback()
    return session
