"""A causal language model trained by transformers' Trainer with this loss on its hidden states."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, BATCH, STEPS = 16384, 96, 4, 3


def peak_bytes(action):
    """The most memory that `action` holds at once, of what the CPU allocator hands out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    held = peak = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.fixture
def data():
    tokens = torch.randint(0, VOCABULARY, (BATCH * STEPS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[:, : LENGTH // 3] = -100
    labels[0, LENGTH // 2 :] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def train(trainer_class, data, folder):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // 2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trainer_class(transformers.LlamaForCausalLM(config), arguments, train_dataset=data)
    peak = peak_bytes(trainer.train)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], peak


def test_trainer_matches_the_stock_loss_in_less_memory(cce, data, tmp_path):
    class LinearLossTrainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            hidden = model.model(**inputs).last_hidden_state
            return cce.linear_cross_entropy(
                hidden, model.lm_head.weight, labels, shift=True, num_items=num_items_in_batch, workspace=8 << 20
            )

    stock, stock_peak = train(transformers.Trainer, data, tmp_path / "stock")
    ours, our_peak = train(LinearLossTrainer, data, tmp_path / "ours")
    assert len(stock) == STEPS and ours == pytest.approx(stock, rel=1e-5)
    logits = BATCH // 2 * LENGTH * VOCABULARY * 4
    assert our_peak < stock_peak - logits, f"{our_peak / 2**20:.0f} MiB, stock {stock_peak / 2**20:.0f} MiB"
