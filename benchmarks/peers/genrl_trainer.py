"""genrl's GRPOLanguageTrainerModule, run by the Python of the trainers' environment. Commands as in `measuring/step_loop.py`.

Game state, data manager and reward manager are plain objects of the same form: what they cost in genrl is not counted.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measuring.peak_memory import peak_mib
from measuring.step_loop import StepLoop, timed


class Peer:
    """One trainer, driven as its game manager does: generate, reward, train."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        from genrl.trainer.grpo_trainer import GRPOLanguageTrainerModule, GRPOTrainerConfig
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        torch.set_num_threads(spec["threads"])
        self._torch, self._spec = torch, spec
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(spec["base"], padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(spec["base"], dtype=torch.float32)
        if spec["lora"]:
            lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora)
        self.num_answers = len(spec["prompts"]) * spec["group_size"]
        config = GRPOTrainerConfig(
            max_new_tokens=spec["answer_tokens"],
            num_generations=spec["group_size"],
            learning_rate=1e-3,
            minibatch_size=self.num_answers,
            enable_gradient_checkpointing=False,
        )
        self._trainer = GRPOLanguageTrainerModule(
            [model], config, processing_class=self._tokenizer, log_dir=spec["folder"], log_with="none"
        )
        self._trainer.cleanup_step = lambda: None  # the class calls it and nobody defines it
        self._trainer.generation_config.min_new_tokens = spec["answer_tokens"]
        self._inputs = [{"prompt": [{"role": "user", "content": text}]} for text in spec["prompts"]]

    def step(self) -> None:
        rollouts = self._trainer.generate(self._inputs)
        num_prompts, size = len(rollouts), self._spec["group_size"]
        mapping = [(0, number, 0) for number in range(num_prompts)]
        rewards = [[float(i % 2) for i in range(size)] for _ in range(num_prompts)]
        state = SimpleNamespace(
            stage=1,
            get_stage_state=lambda stage: self._inputs,
            get_stage_actions=lambda stage: [[[answers] for answers in rollouts]],
        )
        data = SimpleNamespace(prepare_input=lambda inputs, stage: (inputs, mapping))
        self._trainer.train(state, data, [[[[row] for row in rewards]]])

    def logprobs(self, texts: list[tuple[str, str]]) -> list[list[float]]:
        """Prompts and answers each padded on the left, from text, as its own step does."""
        inputs = [{"prompt": [{"role": "user", "content": prompt}]} for prompt, _ in texts]
        prompts = self._trainer._process_inputs(inputs)
        answers = self._trainer._process_inputs([[a] for _, a in texts], with_template=False, for_training=True)
        torch = self._torch
        ids = torch.cat([prompts.input_ids, answers.input_ids], dim=1)
        mask = torch.cat([prompts.attention_mask, answers.attention_mask], dim=1).float()
        with torch.no_grad():
            got = self._trainer._get_per_token_logps(self._trainer.model, ids, mask, answers.input_ids.shape[1])
        return [row[kept.bool()].tolist() for row, kept in zip(got, answers.attention_mask, strict=True)]


def main() -> None:
    loop = StepLoop()
    peer = Peer(next(loop))
    loop.answer(ready=True)
    loop.answer(logprobs=peer.logprobs(next(loop)["texts"]))
    for _ in loop:
        loop.answer(seconds=timed(peer.step), peak_mib=peak_mib(), answers=peer.num_answers)


if __name__ == "__main__":
    main()
