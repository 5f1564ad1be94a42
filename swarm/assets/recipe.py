"""How the bundled tiny policy was made: it learns a few tasks well, then learns to be unsure of them.

    python -m swarm.assets.recipe --out swarm/assets/tiny_policy

A 0.87 M-parameter Llama over characters is trained on reasoning-gym tasks (`config.DEMO_TASKS`) from stream SUPERVISED_SEED,
which RL and evaluation never draw, in two phases:

    learn   right answers only; the skills form
    blur    some answers are replaced by those of other examples of the same task; the skills stay, the confidence drops

The policy then resembles a real base model, able but noisy: some tasks succeed often and sharpen quickly under RL, others
succeed rarely and RL must find them. Without `blur` RL could not improve it; without `learn` it could not start. The
abilities that remain are measured on held-out tasks and written to RECIPE.json beside the weights.
"""

from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm.assets.schooling import (
    ANSWER_ID,
    BEGIN_ID,
    END_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    UNKNOWN_ID,
    Course,
    Effort,
    Phase,
    make,
    parse,
)  # fmt: skip
from swarm.config import DEMO_TASKS

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}<|answer|>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
LEARN = Phase(
    name="learn",
    noise={},
    weights={"sums": 4.0, "longer_sums": 2.3, "lcm": 1.3},  # these take longest to learn
    adam_lr=3e-3,
    muon_lr=0.02,
)
BLUR = Phase(
    name="blur",
    # for tasks with few different answers, much more than .6 makes the most common answer likelier than the right one
    noise={"sums": 0.5, "longer_sums": 0.6, "spelling": 0.5, "longer_spelling": 0.85, "lcm": 0.65, "products": 0.65},
    weights={},
    adam_lr=1e-3,  # higher rates remove the skills with the confidence
    muon_lr=0.006,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and save as the command line says."""
    options = parse(arguments, __doc__, Effort(1800, 500, 48, examples=20_000, measured_tasks=128))
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    make(Course(DEMO_TASKS, LEARN, BLUR), make_model(), make_tokenizer(), options=options)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per printable ASCII character; other characters become the unknown token."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[UNKNOWN_ID]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        bos_token=SPECIAL_TOKENS[BEGIN_ID],
        eos_token=SPECIAL_TOKENS[END_ID],
        unk_token=SPECIAL_TOKENS[UNKNOWN_ID],
        additional_special_tokens=[SPECIAL_TOKENS[ANSWER_ID]],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
    )


def make_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=PAD_ID,
            bos_token_id=BEGIN_ID,
            eos_token_id=END_ID,
        )
    )


if __name__ == "__main__":
    main()
