"""R: requests that were denied. F: nodes left float because int8 would be slower or a rule says so."""

from onnxq.codes.base import Code

REFUSALS = (
    Code("R100", "it cannot be quantized",
         "Something that was asked for was denied; the reason names what stands against it.",
         "Do as the fix says."),
    Code("R101", "the target has no quantized kernel for this operator",
         "In no placement does the engine run this operator in integers.",
         "Nothing for this target; another may have a kernel."),
    Code("R102", "the target's kernel does not take this node",
         "The operator has a quantized kernel, and this node is outside what it takes: a weight computed at run "
         "time, a transposed operand, a type or rank.",
         "Export the network so that the node has the form in the reason."),
    Code("R103", "the target does not have this type here",
         "Bits, scheme, type or granularity asked for have no kernel at this node.",
         "Ask for what the fix lists."),
    Code("R104", "the samples never reach this part of the model",
         "A branch was never run in calibration, or it is a body whose iterations show no tensors: nothing is known of "
         "its ranges.",
         "Give samples that reach the branch; quantize the weights of a Loop or Scan alone (`mode: weight-only`)."),
    Code("R105", "it cannot be quantized alone",
         "A rule forces a node whose kernel exists only together with others, and those stay float.",
         "Force the others as well."),
    Code("R106", "there is no scale for it",
         "Its range was not observed, or the calibration cache has no scale for it.",
         "Calibrate it with samples that reach it."),
    Code("R107", "the tensor cannot be observed",
         "The value lies in a place of the graph that cannot be led out, or its type is not known.",
         "Leave it float with a rule, or export the network without that construct."),
    Code("R108", "the forward cannot be traced",
         "The torch front end found no graph of the module, or calls in it that a graph does not show.",
         "Make the forward traceable, as the fix says, or name the module in `skip_trace`."),
    Code("R109", "nothing is known of this call",
         "The torch front end does not know the function or module, so it stays float.",
         "Register it with @register_qmodule."),
    Code("R110", "its weight cannot be quantized or learned",
         "The weight is parametrized, is learned in another block, or its quantizer cannot learn to round.",
         "Do as the fix says."),
    Code("R111", "an engine or comparison was left out",
         "An engine could not run on this machine, its inner tensors cannot be read, or an output holds no numbers.",
         "Do as the fix says; what else could be compared was."),
    Code("R112", "a rewrite was left out here",
         "A step of preparation or of accuracy would have changed the answers, overflowed or needed a newer opset.",
         "Nothing; the result is right without it."),
    Code("R113", "a pair cannot be switched off",
         "What it costs cannot be measured: no float counterpart was found, or integers are computed on.",
         "Name the float model's nodes as the quantized ones are named."),
    Code("R114", "the cost of saturation is not known here",
         "The node cannot be computed exactly, or a kernel of its kind is not emulated.",
         "Compare on a CPU without VNNI."),
    Code("R115", "it is quantized already",
         "A rule leaves it float, and the model came with it quantized; pairs of the model's own are kept.",
         "Quantize the float model that it was made from."),
)  # fmt: skip

LEFT_FLOAT = (
    Code("F101", "a rule of yours says so",
         "A rule of the configuration leaves the node, or a tensor it cannot do without, in float.",
         "Nothing; take the rule out to quantize it."),
    Code("F102", "int8 would not pay",
         "At this size or in this place the int8 kernel, with what it takes to get to integers and back, is "
         "predicted no faster than float.",
         "Nothing. To quantize it all the same, write a rule with `quantize: true`, or time placements with "
         "`placement: measured`."),
    Code("F103", "int8 is known to cost more than it gives here",
         "The place is one where measurements showed lost accuracy or time: a first convolution, the front end of "
         "a spectrogram, a product with one row.",
         "Nothing. To quantize it all the same, write a rule with `quantize: true`."),
    Code("F104", "quantized only on request",
         "A kernel exists, and using it costs accuracy or time in most networks: attention, products of "
         "activations.",
         "Nothing. To quantize it, write `attention: quantized`, or a rule with `quantize: true`."),
    Code("F105", "float was faster on this machine",
         "Placements were timed here, and the fastest leaves it in float.",
         "Nothing; `placement: rules` does not time."),
    Code("F106", "promoted to float for accuracy",
         "The outputs were further from the float model's than was wished, and this is what brought them nearest.",
         "Nothing; a weaker wish leaves more in integers."),
    Code("F107", "the model came with it as it is",
         "Pairs of the model's own are kept: where they quantize a weight alone, or stand beside a float output, no "
         "other pair joins them.",
         "Nothing. To have it quantized whole, quantize the float model that it was made from."),
    Code("F108", "a custom operator",
         "The operator comes from a library or plugin, and what it computes is not known. The tensors around it get "
         "their ranges as all others do.",
         "Nothing; its neighbours are quantized up to it."),
    Code("F109", "a table of embeddings stays float",
         "A table is a good part of the file, and in int8 it would cost the outputs too much, its rows have few "
         "distinct values left, another node reads the table as it is, or the engine takes float tables only.",
         "Nothing. To quantize it where the engine can, write `embeddings: int8`, or a rule that names it."),
)  # fmt: skip
