"""Quantization-aware training: plain functions and small objects that fit any training loop.

observation   first numbers from a few batches, the same on every rank
parameters    optimizer groups: learned scales have a rate of their own and no weight decay
pacer         what is switched on and frozen at which step
distill       the float model as teacher
batch_norm    batch norms that stay as they are

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

Mixed precision needs nothing special: scales stay float32 and the rounding computes in float32. Compile the model
after its numbers exist. Under DistributedDataParallel wrap the model after `observing`, too.
"""

from torch_frontend.qat.batch_norm import freeze_batch_norms
from torch_frontend.qat.distill import Distiller
from torch_frontend.qat.observation import observing, share_numbers
from torch_frontend.qat.pacer import Pacer, Schedule
from torch_frontend.qat.parameters import parameter_groups, penalty

__all__ = [
    "Distiller",
    "Pacer",
    "Schedule",
    "freeze_batch_norms",
    "observing",
    "parameter_groups",
    "penalty",
    "share_numbers",
]
