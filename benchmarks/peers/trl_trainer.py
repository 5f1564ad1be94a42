"""TRL's GRPOTrainer, run by the Python of its own environment. Commands as in `measuring/step_loop.py`."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measuring.peak_memory import peak_mib
from measuring.step_loop import StepLoop


class Peer:
    """One trainer; `train` runs TRL's own loop, which waits for a command before each step."""

    def __init__(self, loop: StepLoop, spec: dict[str, Any]) -> None:
        import torch
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        torch.set_num_threads(spec["threads"])
        self._torch = torch
        tokenizer = PreTrainedTokenizerFast.from_pretrained(spec["base"], padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(
            spec["base"], dtype=torch.float32 if spec["device"] == "cpu" else torch.bfloat16
        )
        num_answers = len(spec["prompts"]) * spec["group_size"]
        config = GRPOConfig(
            output_dir=spec["folder"],
            per_device_train_batch_size=num_answers,
            num_generations=spec["group_size"],
            max_completion_length=spec["answer_tokens"],
            generation_kwargs={"min_new_tokens": spec["answer_tokens"]},
            learning_rate=1e-3,
            beta=0.0,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_steps=spec["max_steps"],
            use_cpu=spec["device"] == "cpu",
            bf16=spec["device"] == "cuda",
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")

        class Gate(TrainerCallback):
            """A step begins when it is asked for, and its time is told when it has ended."""

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if next(loop, None) is None:
                    sys.exit(0)
                self.started = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                is_cuda = torch.cuda.is_initialized()
                if is_cuda:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - self.started
                peak = torch.cuda.max_memory_allocated() / 2**20 if is_cuda else peak_mib()
                loop.answer(seconds=seconds, peak_mib=peak, answers=num_answers)

        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=[lambda completions, **_: [float(i % 2) for i in range(len(completions))]],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in spec["rendered"]] * spec["max_steps"]),
            processing_class=tokenizer,
            peft_config=lora if spec["lora"] else None,
            callbacks=[Gate()],
        )

    def logprobs(self, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Prompts padded on the left, answers on the right, as its own loop does."""
        torch = self._torch
        pad = self.trainer.processing_class.pad_token_id
        width = max(len(prompt) for prompt, _ in pairs)
        length = max(len(answer) for _, answer in pairs)
        ids = [
            [pad] * (width - len(prompt)) + prompt + answer + [pad] * (length - len(answer)) for prompt, answer in pairs
        ]
        mask = [
            [0] * (width - len(prompt)) + [1] * (len(prompt) + len(answer)) + [0] * (length - len(answer))
            for prompt, answer in pairs
        ]
        with torch.no_grad():
            got = self.trainer._get_per_token_logps_and_entropies(
                self.trainer.model,
                torch.tensor(ids, device=self.trainer.model.device),
                torch.tensor(mask, device=self.trainer.model.device),
                length,
            )[0]
        return [row[: len(answer)].tolist() for row, (_, answer) in zip(got, pairs, strict=True)]


def main() -> None:
    loop = StepLoop()
    peer = Peer(loop, next(loop))
    loop.answer(ready=True)
    loop.answer(logprobs=peer.logprobs(next(loop)["pairs"]))
    peer.trainer.train()


if __name__ == "__main__":
    main()
