"""ONNX Runtime in browsers and Node.js: onnxruntime-web on WebAssembly."""

from onnxq.backends.registry import Backend
from onnxq.backends.web.engine import WebEngine
from onnxq.backends.web.rules import LIMITS, MODES, WEBGPU

BACKEND = Backend(
    name="web",
    title="onnxruntime-web",
    modes=MODES,
    engines=(WebEngine(),),
    limits=LIMITS,
    aliases=("wasm",),
    tables=(WEBGPU,),
)
