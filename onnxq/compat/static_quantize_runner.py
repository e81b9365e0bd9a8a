"""quantize_static on the command line: `python -m onnxq.compat.static_quantize_runner`, with their options."""

from __future__ import annotations

from onnxq.compat.calibrate import CalibrationMethod
from onnxq.compat.quant_utils import QuantFormat, QuantType
from onnxq.compat.quantize import quantize_static
from onnxq.compat.theirs import hand_on

__getattr__ = hand_on("static_quantize_runner")
# Options that are extra options under another name, and those that are one by its name in other letters.
_EXTRAS = {
    "op_types_to_exclude_output_quantization": "OpTypesToExcludeOutputQuantization",
    "qdq_keep_removable_activations": "QDQKeepRemovableActivations",
    "qdq_disable_weight_adjust_for_int32_bias": "QDQDisableWeightAdjustForInt32Bias",
    "add_qdq_pair_to_weight": "AddQDQPairToWeight",
    "dedicated_qdq_pair": "DedicatedQDQPair",
    "use_qdq_contrib_ops": "UseQDQContribOps",
    "matmul_const_b_only": "MatMulConstBOnly",
    "enable_subgraph": "EnableSubgraph",
    "force_quantize_no_input_check": "ForceQuantizeNoInputCheck",
    "calib_tensor_range_symmetric": "CalibTensorRangeSymmetric",
    "calib_moving_average": "CalibMovingAverage",
}
_TYPES = {name.lower(): kind for name, kind in QuantType.__members__.items()}
_METHODS = {name.lower(): method for name, method in CalibrationMethod.__members__.items()}


def main() -> None:
    """Quantize by the options of the command line and the samples in `test_data_set_*` beside the model."""
    args = __getattr__("parse_arguments")()
    extra = {name: getattr(args, option) for option, name in _EXTRAS.items() if getattr(args, option)}
    extra |= {"QuantizeBias": False} if args.disable_quantize_bias else {}
    extra |= {"QDQOpTypePerChannelSupportToAxis": dict(args.op_per_channel_axis)} if args.op_per_channel_axis else {}
    quantize_static(
        args.input_model_path,
        args.output_quantized_model_path,
        __getattr__("OnnxModelCalibrationDataReader")(args.input_model_path),
        quant_format={"qdq": QuantFormat.QDQ, "qoperator": QuantFormat.QOperator}[args.quant_format],
        per_channel=args.per_channel,
        activation_type=_TYPES[args.activation_type],
        weight_type=_TYPES[args.weight_type],
        nodes_to_quantize=args.nodes_to_quantize,
        nodes_to_exclude=args.nodes_to_exclude,
        calibrate_method=_METHODS[args.calibration_method],
        extra_options={
            **extra,
            "TensorQuantOverrides": __getattr__("get_tensor_quant_overrides")(args.tensor_quant_overrides),
        },
    )


if __name__ == "__main__":
    main()
