"""Every CUDA kernel of fake_quantize once, for compute-sanitizer to watch:

compute-sanitizer --tool memcheck python tests/torch/fake_quant/sanitize.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from torch_frontend.fake_quant import available, fake_quantize

SHAPES = (
    ((10007,), None, 0),
    ((9, 16, 14, 14), 1, 0),
    ((70, 24), 1, 0),
    ((3, 9001), 0, 0),
    ((40, 100), 1, 32),
    ((10, 37, 24), 1, 8),
)


def main() -> None:
    """Forward and both backwards of each shape and dtype."""
    if available()["cuda"] != "compiled":
        sys.exit(f"cuda: {available()['cuda']}")
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for shape, axis, block in SHAPES:
            x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
            scales: tuple[int, ...] = () if axis is None else (shape[axis],)
            if block and axis is not None:
                scales = tuple(-(-dim // block) if k == axis else dim for k, dim in enumerate(shape))
            scale = torch.full(scales, 0.2, device="cuda", requires_grad=True)
            zero = torch.zeros(scales, device="cuda", requires_grad=True)
            y = fake_quantize(x, scale, zero, qmin=-8, qmax=7, axis=axis, block_size=block)
            dy = torch.ones_like(y)
            torch.autograd.grad(y, (x, scale, zero), dy, retain_graph=True)
            torch.autograd.grad(y, x, dy)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
