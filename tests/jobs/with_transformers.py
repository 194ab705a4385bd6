"""Hugging Face Trainer with a tiny GPT-2 that is made on the spot."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.set_num_threads(1)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16))
data = [{"input_ids": (row := torch.randint(0, 64, (16,))), "labels": row} for _ in range(32)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            sys.stdout.write(f"rank {arguments.process_index} loss {float(entry['loss']).hex()}\n")
