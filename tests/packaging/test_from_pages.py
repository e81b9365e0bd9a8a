"""The pages for those who come from other tools: each option of theirs has a row, and ours in it are there."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from onnxq.cli import cli
from onnxq.config import Rule, list_presets, parse_setting
from onnxq.passes.registry import SKIPPABLE

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("from-onnxruntime", "from-modelopt", "from-neural-compressor", "from-nncf")
CONTEXT = click.Context(cli)
COMMANDS = {name: cli.get_command(CONTEXT, name) for name in cli.list_commands(CONTEXT)}
FLAGS = {flag for command in COMMANDS.values() for one in command.params for flag in (*one.opts, *one.secondary_opts)}
# Of `python -m modelopt.onnx.quantization --help`, August 2026.
MODELOPT = re.findall(r"\w+", """autotune autotune_node_filter_list autotune_output_dir autotune_pattern_cache
autotune_qdq_baseline
autotune_schemes_per_region autotune_state_file autotune_timing_cache autotune_timing_runs autotune_trtexec_args
autotune_use_trtexec autotune_verbose autotune_warmup_runs block_size calibrate_per_node calibration_cache_path
calibration_data_path calibration_eps calibration_method calibration_shapes direct_io_types disable_mha_qdq dq_only
high_precision_dtype input_shapes_profile keep_intermediate_files log_file log_level mha_accumulation_dtype model_id
nodes_to_exclude nodes_to_quantize onnx_path op_types_to_exclude op_types_to_exclude_fp16 op_types_to_quantize opset
output_path override_shapes passes quantize_mode simplify target_dla trt_plugins trt_plugins_precision
trust_calibration_data trust_remote_code use_external_data_format use_zero_point""")  # fmt: skip
# Of neural_compressor 2.6: PostTrainingQuantConfig, its recipes, AccuracyCriterion and TuningCriterion.
NEURAL_COMPRESSOR = re.findall(r"\w+", """device backend domain model_name recipes quant_format inputs outputs approach
calibration_sampling_size op_type_dict op_name_dict reduce_range example_inputs excluded_precisions quant_level
accuracy_criterion tuning_criterion diagnosis ni_workload_name higher_is_better criterion tolerable_loss strategy
strategy_kwargs timeout max_trials objective smooth_quant smooth_quant_args layer_wise_quant layer_wise_quant_args
rtn_args awq_args gptq_args teq_args autoround_args fast_bias_correction weight_correction gemm_to_matmul
graph_optimization_level first_conv_or_matmul_quantization last_conv_or_matmul_quantization
pre_post_process_quantization add_qdq_pair_to_weight optypes_to_exclude_output_quant dedicated_qdq_pair""")  # fmt: skip

# Of nncf 3.4: quantize, IgnoredScope, AdvancedQuantizationParameters, quantize_with_accuracy_control, compress_weights
# and AdvancedCompressionParameters.
NNCF = re.findall(r"\w+", """model calibration_dataset mode preset target_device subset_size fast_bias_correction
model_type ignored_scope advanced_parameters names patterns types subgraphs validate overflow_fix quantize_outputs
inplace_statistics disable_channel_alignment disable_bias_correction batchwise_statistics
activations_quantization_params weights_quantization_params quantizer_propagation_rule
activations_range_estimator_params weights_range_estimator_params bias_correction_params smooth_quant_alphas
smooth_quant_alpha backend_params validation_dataset validation_fn max_drop drop_type
advanced_quantization_parameters advanced_accuracy_restorer_parameters ratio group_size all_layers dataset
sensitivity_metric awq scale_estimation gptq lora_correction backup_mode compression_format statistics_path
lora_adapter_rank group_size_fallback_mode min_adjusted_group_size awq_params scale_estimation_params gptq_params
lora_correction_params codebook adaptive_codebook_params""")  # fmt: skip


def cells(page: str) -> Iterator[tuple[str, str]]:
    """(their option, ours and note) of each row."""
    for line in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines():
        parts = [part.replace("\\|", "|").strip() for part in re.split(r"(?<!\\)\|", line)]
        if len(parts) == 5 and "`" in parts[1]:
            yield parts[1], f"{parts[2]} {parts[3]}"


def words(page: str) -> set[str]:
    text = " ".join(theirs for theirs, _ in cells(page))
    return {word.lstrip("-") for code in re.findall(r"`([^`]+)`", text) for word in (code, code.split(" ")[0])}


def code(page: str) -> list[str]:
    """The code in the columns that are ours."""
    return [one for _, ours in cells(page) for one in re.findall(r"`([^`]+)`", ours)]


ROWS = {"from-modelopt": MODELOPT, "from-neural-compressor": {*NEURAL_COMPRESSOR} - {"recipes"}, "from-nncf": NNCF}


@pytest.mark.parametrize("page", ROWS)
def test_every_option_has_a_row(page: str) -> None:
    assert set(ROWS[page]) - words(page) == set()


@pytest.mark.parametrize("page", PAGES)
def test_options_of_ours_are_there(page: str) -> None:
    named = {flag for one in code(page) for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", one)}
    # As in `onnxq.compat.preprocess`.
    assert named - FLAGS - {"--input"} == set()
    commands = {name for one in code(page) for name in re.findall(r"\bonnxq ([a-z-]+)", one)}
    assert commands - set(COMMANDS) == set()


@pytest.mark.parametrize("page", PAGES)
def test_presets_are_there(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:--config |`)((?:openvino|ort|trt|virtual)-[a-z0-9-]+)`", text))
    assert named - {*list_presets()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_rules_and_names_of_passes_hold(page: str) -> None:
    for one in code(page):
        if one.startswith("rules: ["):
            for rule in parse_setting(f"rules={one.removeprefix('rules:').replace(', …', ', set: {float: true}')}")[1]:
                Rule.model_validate(rule)
        if one.startswith("set: "):
            Rule.model_validate({"op": "Conv", **parse_setting(f"set={{{one}}}")[1]})
        if one.startswith("skip: "):
            assert set(parse_setting(f"skip={one.removeprefix('skip: ')}")[1]) <= SKIPPABLE
