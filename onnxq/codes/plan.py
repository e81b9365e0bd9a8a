"""Q4xx: plans, and calls in the wrong order."""

from onnxq.codes.base import Code

PLAN = (
    Code("Q400", "the plan cannot be carried out",
         "Something about the plan stops the work; the message names it.",
         "Mend the plan, or plan the model again."),
    Code("Q401", "the file is no plan that this onnxq reads",
         "The file is missing, is no JSON, or was written by another version.",
         "Write one with `onnxq plan`."),
    Code("Q402", "the plan's scales are of other weights",
         "The network is the plan's, its weights are not: it was trained further or is another checkpoint.",
         "Let the scales of weights be computed again, or quantize anew."),
    Code("Q403", "an entry of the plan is wrong",
         "The plan was edited, and an entry has an unknown key, a wrong type, or contradicts another.",
         "Compare with a fresh `onnxq plan`."),
    Code("Q404", "the plan is of another model",
         "The plan names nodes, tensors or constants that this model does not have.",
         "Plan this model again, or give the model that the plan was made for."),
    Code("Q405", "the plan has no numbers yet",
         "A plan from `onnxq plan` says where pairs go; their scales come from calibration.",
         "Give samples, or use a plan that `onnxq quantize` wrote."),
    Code("Q406", "the target has no kernel for this site",
         "An edited plan asks for what its target does not run or would read wrongly.",
         "Plan the model again, or give the site a spec from a fresh plan."),
    Code("Q407", "scales do not fit their tensor",
         "The number of scales, or the axis, is not that of the tensor; or a scale is 0, negative or not finite.",
         "Calibrate again, or change the granularity."),
    Code("Q408", "quantized values do not fit their site",
         "Integers given for a weight are outside its type, of another shape, or could overflow 16-bit sums.",
         "Take them out and plan the model again, or hand in values that fit."),
    Code("Q409", "a step comes too early or too late",
         "The torch front end is calibrated, then frozen, then exported; the message names the step that is "
         "missing.",
         "Call that step first."),
    Code("Q410", "batch norms cannot be tuned in this model",
         "Batch norm tuning needs a traced model whose batch norms are still there and whose scales follow "
         "channels.",
         "Do as the message says, or leave the tuning out."),
)  # fmt: skip
