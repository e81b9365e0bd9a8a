"""Quantization-aware training: plain functions and small objects that fit any training loop.

observation   first qparams from a few batches, the same on every rank
training      optimizer groups, a schedule of quantizers and batch norms, the float model as teacher

    model = QuantModel(net, config)
    with qat.observing(model):
        for x, _ in few_batches:
            model(x)
    model.init_qat()
    optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.01, weight_decay=1e-4), momentum=0.9)
    pacer = qat.Pacer(model, qat.Schedule(freeze_batch_norms=1000, freeze_scales=1500))
    pacer.attach(optimizer)
    for x, target in batches:
        pacer.step()
        loss = criterion(model(x), target) + qat.penalty(model)
        ...

Mixed precision needs nothing special: scales are float32 and rounding is computed in float32. Compile the model, and
wrap it in DistributedDataParallel, after `observing`: before, learned scales do not exist.
"""

# Plain functions and objects, no trainer: the loop, the optimizer and the launcher stay the user's.
from torch_frontend.qat.observation import observing, share_qparams
from torch_frontend.qat.training import (
    Distiller,
    Pacer,
    Schedule,
    freeze_batch_norms,
    parameter_groups,
)
from torch_frontend.quantizers import penalty

__all__ = [
    "Distiller",
    "Pacer",
    "Schedule",
    "freeze_batch_norms",
    "observing",
    "parameter_groups",
    "penalty",
    "share_qparams",
]
