"""A small Llama, quantized by other tools, for `checkpoints.py`: run with the interpreter of an environment of theirs.

    TOOLS/bin/python benchmarks/checkpoint_tools.py FORMAT FOLDER

Writes FOLDER/checkpoint (or checkpoint.gguf), two exports of the network with the weights as the tool dequantizes them
(dynamo.onnx; script.onnx, with the names of nodes that TorchScript's exporter gives, as in exports of optimum), and
answers.npz: tokens, and the logits of the tool's own model on them. The last line is the tool's version.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

WORDS, LENGTH = 512, 64
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=WORDS,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
# Names of GGUF for those of transformers.
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def make_tokens(count: int) -> torch.Tensor:
    """Sequences of a language in which each word has few followers."""
    random = np.random.default_rng(count)
    followers = np.random.default_rng(0).integers(0, WORDS, (WORDS, 4))
    words = [random.integers(0, WORDS, count)]
    for _ in range(LENGTH - 1):
        words.append(followers[words[-1], random.integers(0, 4, count)])
    return torch.from_numpy(np.stack(words, 1))


def train(folder: Path) -> LlamaForCausalLM:
    """The network in float, after a minute of training; saved for those tools that read folders."""
    torch.manual_seed(0)
    net = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for step in range(120):
        tokens = make_tokens(1000 + step)[:32]
        optimizer.zero_grad()
        net(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    net.eval().save_pretrained(folder)
    return net


def make_tokenizer(folder: Path) -> object:
    """A tokenizer of as many words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{k}": k for k in range(WORDS)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
    tokenizer.save_pretrained(folder)
    return tokenizer


def quantize_by_llmcompressor(scheme: str, floats: Path, out: Path) -> torch.nn.Module:
    """compressed-tensors: pack-quantized, or int-quantized with data."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers.utils.quantization_config import CompressedTensorsConfig

    tokenizer = make_tokenizer(floats)
    tokens = make_tokens(16)
    rows = {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    data = {
        "dataset": Dataset.from_dict(rows),
        "num_calibration_samples": len(tokens),
        "max_seq_length": LENGTH,
    }
    group = QuantizationArgs(
        num_bits=4, strategy="group", group_size=64, symmetric=False, actorder="weight"
    )
    channel = QuantizationArgs(num_bits=8, strategy="channel")
    tensor = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False, symmetric=False)
    static = QuantizationScheme(targets=["Linear"], weights=channel, input_activations=tensor)
    recipes = {
        "W4A16": (QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]), {}),
        "GPTQ": (
            GPTQModifier(
                config_groups={"g": QuantizationScheme(targets=["Linear"], weights=group)},
                ignore=["lm_head"],
            ),
            data,
        ),
        "W8A8": (QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]), {}),
        "W8A8 static": (
            QuantizationModifier(config_groups={"g": static}, ignore=["lm_head"]),
            data,
        ),
    }
    recipe, samples = recipes[scheme]
    net = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    oneshot(model=net, tokenizer=tokenizer, recipe=recipe, **samples)
    net.save_pretrained(out, save_compressed=True)
    plain = CompressedTensorsConfig(run_compressed=False)
    return AutoModelForCausalLM.from_pretrained(out, quantization_config=plain, dtype=torch.float32)


def quantize_by_gptqmodel(method: str, floats: Path, out: Path) -> torch.nn.Module:
    """GPTQ, v1 or v2."""
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT

    make_tokenizer(floats)
    options = {
        "gptq": {"format": FORMAT.GPTQ},
        "gptq desc_act": {"format": FORMAT.GPTQ, "desc_act": True},
        "gptq_v2": {"format": FORMAT.GPTQ_V2, "sym": False},
    }[method]
    model = GPTQModel.load(
        str(floats), QuantizeConfig(bits=4, group_size=64, **options), device="cpu"
    )
    rows = [{"input_ids": row, "attention_mask": [1] * LENGTH} for row in make_tokens(16).tolist()]
    model.quantize(rows, batch_size=1)
    model.save(str(out))
    return load_by_gptqmodel(out)


def quantize_by_autoround(kind: str, floats: Path, out: Path) -> torch.nn.Module:
    """AWQ, with roundings by signed gradients."""
    from auto_round import AutoRound

    net = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    rows = [{"input_ids": row[None]} for row in make_tokens(16)]
    options = {
        "iters": 20,
        "nsamples": 16,
        "seqlen": LENGTH,
        "batch_size": 4,
        "enable_torch_compile": False,
    }
    tool = AutoRound(
        net,
        make_tokenizer(floats),
        bits=4,
        group_size=64,
        sym=False,
        dataset=rows,
        device_map="cpu",
        **options,
    )
    tool.quantize_and_save(str(out), format=kind)
    # It makes a folder of its own, named after the model and the form.
    return load_by_gptqmodel(next(path.parent for path in out.rglob("*.safetensors")))


def load_by_gptqmodel(folder: Path) -> torch.nn.Module:
    """The network with gptqmodel's kernels in torch, in float32."""
    from gptqmodel import BACKEND, GPTQModel

    # In float16, as scales are stored: by default it loads them in bfloat16, which rounds them.
    return GPTQModel.load(
        str(folder), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16
    ).model.float()


def write_gguf(kind: str, net: LlamaForCausalLM, out: Path) -> torch.nn.Module:
    """GGUF by its own writer, as llama.cpp names and orders the weights of a Llama."""
    import gguf

    writer, weights = (
        gguf.GGUFWriter(out, "llama"),
        {name: value.detach().numpy() for name, value in net.state_dict().items()},
    )
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_rope_dimension_count(CONFIG.hidden_size // CONFIG.num_attention_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_vocab_size(WORDS)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{k}" for k in range(WORDS)])
    writer.add_token_scores([0.0] * WORDS)
    writer.add_token_types([1] * WORDS)
    quantized = gguf.GGMLQuantizationType[kind]

    def add(name: str, value: np.ndarray) -> None:
        value = value.astype(np.float32)
        if value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, value)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output.weight", weights["lm_head.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    heads = {"attn_q": CONFIG.num_attention_heads, "attn_k": CONFIG.num_key_value_heads}
    for layer in range(CONFIG.num_hidden_layers):
        for theirs, ours in GGUF_NAMES.items():
            value = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours in heads:
                # llama.cpp turns neighbours where transformers turns halves.
                halves = value.reshape(heads[ours], 2, -1, value.shape[1])
                value = halves.swapaxes(1, 2).reshape(value.shape)
            add(f"blk.{layer}.{ours}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoModelForCausalLM.from_pretrained(out.parent, gguf_file=out.name, dtype=torch.float32)


TOOLS = {
    "auto-round": quantize_by_autoround,
    "gptqmodel": quantize_by_gptqmodel,
    "llmcompressor": quantize_by_llmcompressor,
}


class Logits(torch.nn.Module):
    """A network from tokens to logits alone."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # With a mask, or TorchScript's exporter meets operators that it does not know.
        return self.net(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def find_weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a network of the tool as it dequantizes them, by the names of the float one."""
    weights = dict(net.state_dict())
    for name, module in net.named_modules():
        if hasattr(module, "qweight"):
            # What the kernel makes of unit vectors.
            with torch.no_grad():
                weights[f"{name}.weight"] = module(torch.eye(module.in_features)).T.contiguous()
    return weights


def export(net: torch.nn.Module, folder: Path) -> None:
    """Two exports of the float network with the tool's weights, and the answers of the tool's own network."""
    plain = LlamaForCausalLM(CONFIG).eval()
    weights = find_weights(net)
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    tokens = make_tokens(8)
    with torch.no_grad():
        answers = net(input_ids=tokens).logits.float().numpy()
    np.savez(folder / "answers.npz", ids=tokens.numpy(), logits=answers)
    names = {"input_names": ["ids"], "output_names": ["logits"]}
    shapes = {"ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
    dynamo = {"dynamo": True, "external_data": False, "verbose": False, "dynamic_shapes": shapes}
    torch.onnx.export(Logits(plain), (tokens,), folder / "dynamo.onnx", **names, **dynamo)
    axes = {"dynamic_axes": {"ids": {0: "batch", 1: "length"}}}
    torch.onnx.export(
        Logits(plain), (tokens,), folder / "script.onnx", dynamo=False, **names, **axes
    )


def main() -> None:
    """Make one checkpoint."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    tool, _, kind = sys.argv[1].partition(":")
    folder = Path(sys.argv[2])
    floats, out = folder.parent / "float", folder / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    if not (floats / "config.json").exists():
        train(floats)
    if tool == "gguf":
        net = write_gguf(
            kind,
            AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32),
            folder / "checkpoint.gguf",
        )
    else:
        net = TOOLS[tool](kind, floats, out)
    export(net.eval(), folder)
    print(json.dumps({"version": version(tool)}))


if __name__ == "__main__":
    main()
