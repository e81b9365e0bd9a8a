"""QAT by the Trainer of Hugging Face: labels in training, none in the exported file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the Trainer is part of transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
import torch.nn.functional as F
from torch import Tensor

from onnxq.runtime import Session
from torch_frontend import qat
from torch_frontend.export import export_onnx
from torch_frontend.quant_model import QuantModel

Example = dict[str, Tensor]


def make_bert() -> Any:
    torch.manual_seed(0)
    sizes = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(sizes).eval()


def make_examples(count: int) -> list[Example]:
    """Texts whose first word says their class; the last words are padding."""
    words = torch.randint(3, 50, (count, 8), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(8) < 6).long().expand(count, 8)
    return [{"input_ids": w, "attention_mask": m, "labels": w[0] % 3} for w, m in zip(words, mask, strict=True)]


def make_trainer(model: QuantModel, folder: Path, examples: list[Example], steps: int) -> Any:
    settings = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, use_cpu=True, report_to=[],
        remove_unused_columns=False, label_names=["labels"], save_steps=steps, disable_tqdm=True, logging_steps=4,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=3e-3))
    qat.Pacer(model).attach(optimizer)
    return transformers.Trainer(
        model, settings, train_dataset=examples, eval_dataset=examples, optimizers=(optimizer, None),
        compute_loss_func=lambda outputs, labels, **_: F.cross_entropy(outputs["logits"], labels),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_trainer_trains_saves_and_resumes(tmp_path: Path) -> None:
    examples = make_examples(32)
    inputs = {key: torch.stack([one[key] for one in examples]) for key in ("input_ids", "attention_mask")}
    config = {"target": "ort", "torch": {"weights": {"quantizer": "lsq"}}}
    model = QuantModel(make_bert(), config, example_inputs=inputs)
    with qat.observing(model):
        model(**inputs)
    model.init_qat()
    trainer = make_trainer(model, tmp_path / "out", examples, 12)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before

    saved = QuantModel(make_bert(), config, example_inputs=inputs)
    load = pytest.importorskip("safetensors.torch", reason="the Trainer saves with safetensors").load_file
    saved.load_state_dict(load(tmp_path / "out" / "checkpoint-12" / "model.safetensors"))
    model.freeze()
    saved.freeze()
    trained = model(**inputs)["logits"]
    torch.testing.assert_close(saved(**inputs)["logits"], trained)

    names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["logits"]}
    export_onnx(model, tmp_path / "bert.onnx", inputs, **names)
    found = Session(tmp_path / "bert.onnx", optimize=False).run({key: value.numpy() for key, value in inputs.items()})
    np.testing.assert_allclose(found["logits"], trained.detach().numpy(), atol=1e-4)
