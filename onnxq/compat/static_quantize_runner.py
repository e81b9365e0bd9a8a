"""quantize_static on the command line: `python -m onnxq.compat.static_quantize_runner`, with their options."""

import sys

from onnxq.compat.calibrate import CalibrationMethod
from onnxq.compat.options import STATIC_EXTRAS, UnaskedMethod
from onnxq.compat.quant_utils import QuantFormat, QuantType
from onnxq.compat.quantize import quantize_static
from onnxq.compat.theirs import hand_on

__getattr__ = hand_on("static_quantize_runner")
# Extra options by the words of their names, as the command line has them.
_EXTRAS = {name.lower(): name for name in STATIC_EXTRAS.keys() - {"TensorQuantOverrides"}}
_TYPES = {name.lower(): kind for name, kind in QuantType.__members__.items()}
_METHODS = {name.lower(): method for name, method in CalibrationMethod.__members__.items()}


def main() -> None:
    """Quantize by the options of the command line and the samples in `test_data_set_*` beside the model."""
    args = __getattr__("parse_arguments")()
    given = {option.replace("_", ""): value for option, value in vars(args).items() if value}
    extra = {_EXTRAS[option]: value for option, value in given.items() if option in _EXTRAS}
    extra["TensorQuantOverrides"] = __getattr__("get_tensor_quant_overrides")(
        args.tensor_quant_overrides
    )
    if args.disable_quantize_bias:
        extra["QuantizeBias"] = False
    if args.op_per_channel_axis:
        extra["QDQOpTypePerChannelSupportToAxis"] = dict(args.op_per_channel_axis)
    names_method = any(word.startswith("--calibration_m") for word in sys.argv)
    quantize_static(
        args.input_model_path,
        args.output_quantized_model_path,
        __getattr__("OnnxModelCalibrationDataReader")(args.input_model_path),
        quant_format={"qdq": QuantFormat.QDQ, "qoperator": QuantFormat.QOperator}[
            args.quant_format
        ],
        per_channel=args.per_channel,
        activation_type=_TYPES[args.activation_type],
        weight_type=_TYPES[args.weight_type],
        nodes_to_quantize=args.nodes_to_quantize,
        nodes_to_exclude=args.nodes_to_exclude,
        # Their parser fills in its default: a word of the command line asks for it.
        calibrate_method=_METHODS[args.calibration_method]
        if names_method
        else UnaskedMethod.MinMax,
        extra_options=extra,
    )


if __name__ == "__main__":
    main()
