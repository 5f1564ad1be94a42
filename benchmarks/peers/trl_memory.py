"""One training step of TRL's GRPOTrainer on made-up answers, by the Python of its own environment. See benchmarks/memory.py."""

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import Dataset
from measuring.peak_memory import forget_peak, peak_mib, resident_mib
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def main(spec: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(spec["threads"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(spec["base"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec["base"], dtype=torch.float32)
    vocab_size = model.config.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=spec["answers"],
            num_generations=spec["answers"],
            max_completion_length=spec["answer_tokens"],
            learning_rate=1e-3,
            beta=0.0,
            gradient_checkpointing=spec["checkpointing"],
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "made-up"}] * spec["answers"]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.create_optimizer_and_scheduler(num_training_steps=1)
        trainer.current_gradient_accumulation_steps = 1  # as its loop sets it
        rng = random.Random(0)

        def tokens(rows: int, count: int) -> torch.Tensor:
            return torch.tensor([[rng.randrange(3, vocab_size) for _ in range(count)] for _ in range(rows)])

        prompt = tokens(1, spec["prompt_tokens"]).expand(spec["answers"], -1)
        answers = tokens(spec["answers"], spec["answer_tokens"])
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": answers,
            "completion_mask": torch.ones_like(answers),
            "advantages": torch.tensor([1.0, -1.0]).repeat(spec["answers"] // 2),
            "num_items_in_batch": torch.tensor(answers.numel()),
        }
        loaded = resident_mib()
        forget_peak()
        started = time.perf_counter()
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, inputs)  # its own log-probs, entropy and loss
        trainer.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        return {"loaded_mib": loaded, "peak_mib": peak_mib(), "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
