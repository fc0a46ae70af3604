"""transformers' Trainer on CPUs, with a small GPT-2 of random weights.

    drumline run --nproc-per-node 2 -- python with_transformers.py

``TrainingArguments(ddp_backend=...)`` refuses names that accelerate does not know. A group that is there
already is taken as it is.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "drumline")
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    per_device_train_batch_size=4,
    max_steps=8,
    learning_rate=3e-3,
    eval_strategy="steps",
    eval_steps=4,
    logging_steps=2,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    seed=1,
)
set_seed(1)
config = GPT2Config(
    vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = GPT2LMHeadModel(config)
rows = torch.arange(16).repeat(100, 1).add(torch.arange(100)[:, None]).remainder(50)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:30])
trainer.remove_callback(PrinterCallback)  # it rounds
trainer.train()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in entry:
                print(f"step {entry['step']}: {name} {entry[name]:.9f}")
dist.destroy_process_group()
