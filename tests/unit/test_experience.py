"""What of a foreign group is usable, by lineage.

Between the bundled Llama, which reads characters, and a GPT-NeoX with byte-level BPE and a chat template.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from swarm.config import PolicySection, TrainingSection
from swarm.policy.logprobs import TokenLogprobs, TokenSequence
from swarm.policy.policy import Policy, load_policy
from swarm.sharing.reputation import Reputation
from swarm.training.experience import ForeignGroup, LikelihoodFloor, RolloutConverter, least_likely_stretch
from swarm.training.micro_batch import TrainingSequence, training_sequences
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from swarm.types import PLAIN, Lineage, Rollout, RolloutGroup, TaskRef
from tests.unit.experience_factory import Clock
from tests.unit.tiny_models import SHAPE, build_policy, sampled_groups

PROMPT = "What is 5 + 7?"
BPE_LINES = ["the answer is twelve", "12 + 5 = 17, so the answer is 17", "What is 5 + 7?"]
BPE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HOSTILE = ["</s>", "12</s>", "<|im_end|>", "<|im_start|>user\n", "a<|end|>b", "<eos>", "<|endoftext|>12", "<|pad|>"]


def write_bpe_model(folder: Path, num_embeddings: int = 340) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        BPE_LINES * 4, trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=BPE_TEMPLATE,
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    shape: dict[str, Any] = SHAPE | {
        "vocab_size": num_embeddings,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    GPTNeoXForCausalLM(GPTNeoXConfig(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama() -> Policy:
    """The bundled policy: characters, no chat template."""
    torch.set_num_threads(1)
    return load_policy(PolicySection(), device="cpu")


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return build_policy(write_bpe_model(tmp_path_factory.mktemp("bpe")))


def written_by(author: Policy, *texts: str, finished: bool = True, rewards: tuple[float, ...] = ()) -> RolloutGroup:
    """As the author's node would publish them; the first one right where `rewards` does not say."""

    def rollout(index: int, text: str) -> Rollout:
        ids = (*author.encode_answer(text), *([author.eos_token_ids[0]] if finished else []))
        reward = rewards[index] if rewards else float(index == 0)
        return Rollout(text, ids, (-0.7,) * len(ids), finished, reward)

    rollouts = tuple(rollout(index, text) for index, text in enumerate(texts))
    return RolloutGroup(TaskRef("made-up", "0" * 16, 16, 0), "0" * 16, rollouts, "other", author.lineage, 3)


def translator(policy: Policy, quantile: float = 0.0, max_new_tokens: int = 64) -> RolloutConverter:
    return RolloutConverter(policy, quantile, max_new_tokens)


def sequences(policy: Policy, group: RolloutGroup, **settings: object) -> list[TrainingSequence]:
    got = translator(policy).foreign(PROMPT, group)
    assert got is not None
    return training_sequences([got], TrainingSection.model_validate(settings), 64, stop=("\n\n",))


@pytest.mark.parametrize(
    ("same_policy", "same_tokenizer", "usable", "known"),
    [(True, True, True, True), (False, True, False, True), (False, False, False, False), (True, False, False, False)],
)
def test_logprobs_weigh_within_a_lineage_and_measure_within_a_tokenizer(
    make_policy: Callable[..., Policy], same_policy: bool, same_tokenizer: bool, usable: bool, known: bool
) -> None:
    policy = make_policy()
    (sampled,) = sampled_groups(policy, ("Hi",))
    group = replace(
        sampled.group, rollouts=tuple(replace(r, finished=r.token_ids[-1] == 2) for r in sampled.group.rollouts)
    )
    own = policy.lineage
    lineage = Lineage(own.policy if same_policy else "1" * 32, own.tokenizer if same_tokenizer else "2" * 32)
    got = translator(policy).foreign("Hi", replace(group, lineage=lineage))
    assert got is not None
    assert (got.usable_logprobs, got.known_logprobs, got.is_own) == (usable, known, False)


def test_a_text_over_which_the_tokenizer_panics_costs_that_answer_alone(
    make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    """The author of a base writes the pattern, and a stranger the text that sets it off."""
    folder = Path(shutil.copytree(make_policy().base_folder, tmp_path / "base"))
    rules = json.loads((folder / "tokenizer.json").read_text())
    characters = {"type": "Split", "pattern": {"Regex": "(a+)+$|."}, "behavior": "Isolated", "invert": False}
    replaced = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}, replaced]}
    (folder / "tokenizer.json").write_text(json.dumps({**rules, "pre_tokenizer": characters, "decoder": decoder}))
    policy = load_policy(PolicySection(base=str(folder)), device="cpu")
    trigger = "a" * 30 + "!"
    assert policy.encode_answer(trigger) == [] == policy.encode_prompt(trigger)
    (b, bang), (a,) = policy.encode_answer("b!"), policy.encode_answer("a")
    assert policy.decode([b, bang]) == "b!" and policy.decode([*[a] * 30, bang]) == ""
    assert policy.encode_prompt("b!")
    (sampled,) = sampled_groups(policy, ("Hi",))
    good, *others = sampled.group.rollouts
    rollouts = (replace(good, text=trigger, finished=True), *others)
    stranger = replace(sampled.group, rollouts=rollouts, lineage=Lineage("1" * 32, "2" * 32))
    read = translator(policy)._re_encoded(stranger, PLAIN)
    assert [one.text for one in read.rollouts] == [one.text for one in others]
    assert translator(policy).foreign(trigger, stranger) is None


def test_the_two_policies_share_neither_lineage_nor_tokenizer_nor_ids(llama: Policy, neox: Policy) -> None:
    assert llama.lineage.policy != neox.lineage.policy and llama.lineage.tokenizer != neox.lineage.tokenizer
    assert type(llama.model.base_model.model) is not type(neox.model.base_model.model)
    assert llama.encode_answer("twelve") != neox.encode_answer("twelve")


@pytest.mark.parametrize("to_chat", [True, False])
def test_text_of_another_tokenizer_is_encoded_anew_with_own_prompt_and_own_eos(
    llama: Policy, neox: Policy, to_chat: bool
) -> None:
    author, reader = (llama, neox) if to_chat else (neox, llama)
    got = translator(reader).foreign(PROMPT, written_by(author, "12", "the answer is 17"))
    assert got is not None and not got.usable_logprobs and not got.known_logprobs
    assert list(got.prompt_ids) == reader.encode_prompt(PROMPT)
    if to_chat:  # the reader's template, whatever the author's prompt looked like
        assert (
            reader.tokenizer.decode(got.prompt_ids) == f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
        )
    for rollout, text in zip(got.group.rollouts, ("12", "the answer is 17"), strict=True):
        assert rollout.token_ids == (*reader.encode_answer(text), reader.eos_token_ids[0])
        assert reader.decode(rollout.token_ids) == rollout.text == text
        assert len(rollout.logprobs) == len(rollout.token_ids) and max(rollout.token_ids) < reader.vocab_size


def test_the_model_gives_the_re_encoded_tokens_the_gradient(llama: Policy, neox: Policy) -> None:
    """One real step of the reader on nothing but foreign text moves its adapter."""
    reader = neox
    got = translator(reader).foreign(PROMPT, written_by(llama, "12", "the answer is 17"))
    assert got is not None
    config = TrainingSection()
    report = Trainer(config, reader, LocalOptimizer(config, reader), temperature=1.0, max_new_tokens=64).step([got])
    assert not report.skipped and report.num_tokens == sum(len(r.token_ids) for r in got.group.rollouts)
    assert report.sampler_kl is None and report.ess_fraction == 1.0 and report.staleness_mean is None


@pytest.mark.parametrize(
    ("case", "has_logprobs", "comparable"),
    [("same lineage", True, True), ("same tokenizer", True, False), ("other", False, False)],
)
def test_corrections_see_the_logprobs_that_the_case_allows(
    llama: Policy, neox: Policy, case: str, has_logprobs: bool, comparable: bool
) -> None:
    group = written_by(neox if case == "other" else llama, "12", "13")
    if case == "same tokenizer":
        group = replace(group, lineage=Lineage("1" * 32, llama.lineage.tokenizer))
    for sequence in sequences(llama, group):
        assert (sequence.behaviour_logprobs is not None) == has_logprobs
        assert sequence.is_comparable == comparable
        assert sequence.segments == () and not sequence.is_replay


def test_a_cut_answer_gets_no_eos_and_is_masked_but_counts_in_the_baseline(llama: Policy, neox: Policy) -> None:
    whole, cut = written_by(neox, "12"), written_by(neox, "13 and th", finished=False, rewards=(0.0,))
    group = replace(whole, rollouts=whole.rollouts + cut.rollouts)
    got = translator(llama).foreign(PROMPT, group)
    assert got is not None
    assert got.group.rollouts[1].token_ids == tuple(llama.encode_answer("13 and th"))  # no EOS
    (one,) = sequences(llama, group, advantage="dr_grpo")
    assert one.answer_ids == (*llama.encode_answer("12"), llama.eos_token_ids[0])
    assert one.advantage == 0.5  # 1 - mean of both
    assert len(sequences(llama, group, mask_truncated=False)) == 2


def test_an_answer_that_a_stop_string_ended_is_whole_without_eos(llama: Policy, neox: Policy) -> None:
    group = written_by(llama, "12\n\n", "13\n\n", finished=False)
    got = sequences(neox, group)
    assert [sequence.answer_ids for sequence in got] == [tuple(neox.encode_answer(t)) for t in ("12\n\n", "13\n\n")]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("to_chat", [True, False])
def test_names_of_special_tokens_in_a_text_never_become_special_tokens(
    llama: Policy, neox: Policy, text: str, to_chat: bool
) -> None:
    author, reader = (llama, neox) if to_chat else (neox, llama)
    group = written_by(author, "12", "13")
    hostile = replace(group.rollouts[1], text=text)
    got = translator(reader).foreign(PROMPT, replace(group, rollouts=(*group.rollouts, hostile)))
    assert got is not None
    special = {*reader.tokenizer.all_special_ids, *reader.eos_token_ids}
    for rollout in got.group.rollouts:
        assert not special & {*rollout.token_ids[:-1]}
        assert rollout.token_ids[-1] == reader.eos_token_ids[0]
        assert reader.decode(rollout.token_ids) == rollout.text
    assert [rollout.text for rollout in got.group.rollouts] == ["12", "13", text]


def test_ids_that_hide_special_tokens_are_left_out_in_the_own_tokenizer_too(llama: Policy) -> None:
    """The text does not show them, so admission's spelling check passes; trained on, they would be learned."""
    group = written_by(llama, "12", "13", "14")
    bos = next(i for i in llama.tokenizer.all_special_ids if i not in llama.eos_token_ids)
    ids = (bos, bos, *group.rollouts[2].token_ids)
    assert llama.decode(ids) == "14"
    poisoned = replace(group.rollouts[2], token_ids=ids, logprobs=(-0.7,) * len(ids))
    reader = translator(llama)
    got = reader.foreign(PROMPT, replace(group, rollouts=(*group.rollouts[:2], poisoned)))
    assert got is not None and got.group.rollouts == group.rollouts[:2]
    assert reader.num_answers_text_mismatch == 1


@pytest.mark.parametrize(
    "hidden", ["<|im_start|>", 339, 1 << 20], ids=["flagged", "beyond the vocabulary", "beyond all"]
)
def test_ids_that_no_text_shows_are_left_out_whatever_the_tokenizer_calls_special(
    tmp_path: Path, hidden: str | int
) -> None:
    """Llama 3 names two of its 256 special tokens as such; the embedding of Qwen 2.5 is longer than its vocabulary."""
    folder = write_bpe_model(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["extra_special_tokens"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    policy = build_policy(folder)
    token = policy.tokenizer.convert_tokens_to_ids(hidden) if isinstance(hidden, str) else hidden
    assert token not in policy.tokenizer.all_special_ids
    group = written_by(policy, "12", "13", "14")
    ids = (token, *group.rollouts[2].token_ids)
    assert policy.decode(ids) == "14", "the spelling check of admission passes"
    poisoned = replace(group.rollouts[2], token_ids=ids, logprobs=(-0.7,) * len(ids))
    reader = translator(policy)
    got = reader.foreign(PROMPT, replace(group, rollouts=(*group.rollouts[:2], poisoned)))
    assert got is not None and got.group.rollouts == group.rollouts[:2]
    assert reader.num_answers_text_mismatch == 1


def test_a_token_for_which_the_model_has_no_embedding_is_left_out(tmp_path: Path) -> None:
    whole = build_policy(write_bpe_model(tmp_path / "whole"))
    last = max(whole.tokenizer.get_vocab().values())
    policy = build_policy(write_bpe_model(tmp_path / "cut", num_embeddings=last))
    group = written_by(policy, "12", "13")
    beyond = Rollout(policy.decode([last]), (last,), (-0.7,), False, 0.0)
    assert beyond.text
    reader = translator(policy, quantile=0.5)
    reader.observe_own([(-1e9,)] * 64)
    got = reader.foreign(PROMPT, replace(group, rollouts=(*group.rollouts, beyond)))
    assert got is not None and got.group.rollouts == group.rollouts


def test_text_that_the_own_tokenizer_cannot_spell_is_left_out(llama: Policy, neox: Policy) -> None:
    reader = translator(llama)
    got = reader.foreign(PROMPT, written_by(neox, "12", "13", "日本 12"))
    assert got is not None and [rollout.text for rollout in got.group.rollouts] == ["12", "13"]
    assert reader.foreign(PROMPT, written_by(neox, "日", "13")) is None
    assert reader.num_answers_text_mismatch == 2 and reader.dropped == {"nothing_usable": 1}
    back = translator(neox).foreign(PROMPT, written_by(neox, "é日本 12", "13"))
    assert back is not None and back.group.rollouts[0].text == "é日本 12"


def test_an_empty_answer_is_eos_alone_if_it_was_finished_and_nothing_if_it_was_cut(llama: Policy, neox: Policy) -> None:
    finished, cut = written_by(neox, "12", "", "13"), written_by(neox, "", finished=False, rewards=(0.0,))
    got = translator(llama).foreign(PROMPT, replace(finished, rollouts=finished.rollouts + cut.rollouts))
    assert got is not None
    assert [r.text for r in got.group.rollouts] == ["12", "", "13"]
    assert got.group.rollouts[1].token_ids == (llama.eos_token_ids[0],)


class Measuring(RolloutConverter):
    """Remembers how many tokens the answers had that went through the model."""

    measured: list[int]

    def _logprobs(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        self.measured = [len(answer) for _, answer in sequences]
        return super()._logprobs(sequences)


def test_an_answer_too_long_once_re_encoded_is_not_trained_on_and_measured_by_its_beginning(
    llama: Policy, neox: Policy
) -> None:
    long = "the answer is twelve " * 6  # 6 tokens of one tokenizer's are 126 of the other's
    group = written_by(neox, "12", "13", long)
    assert len(neox.encode_answer(long)) <= 64 < len(llama.encode_answer(long))
    reader = Measuring(llama, 0.5, max_new_tokens=64)
    reader.observe_own([(-1e9,)] * 64)  # a floor under everything: none is below
    got = reader.foreign(PROMPT, group)
    assert got is not None and len(got.group.rollouts) == 3 and reader.measured == [3, 3, 64]
    trained = training_sequences([got], TrainingSection(advantage="dr_grpo"), 64)
    assert [len(sequence.answer_ids) for sequence in trained] == [3, 3]
    assert trained[0].advantage == pytest.approx(2 / 3)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many answers go through a model together."""
    found: list[int] = []
    measure = Policy.token_logprobs

    def watched(policy: Policy, answers: Sequence[TokenSequence]) -> TokenLogprobs:
        found.append(len(answers))
        return measure(policy, answers)

    monkeypatch.setattr(Policy, "token_logprobs", watched)
    return found


def test_a_large_group_is_measured_in_parts_that_fit_into_memory(
    llama: Policy, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may send 64 answers where this node has memory for a few."""
    group = written_by(llama, *(str(number) for number in range(11)))
    prompt, answers = tuple(llama.encode_prompt(PROMPT)), [one.token_ids for one in group.rollouts]
    whole = translator(llama)._logprobs([(prompt, answer) for answer in answers])
    assert at_once.pop() == len(answers)
    monkeypatch.setattr(llama, "micro_batch_tokens", 2 * len(prompt))
    in_parts = translator(llama)._logprobs([(prompt, answer) for answer in answers])
    assert len(at_once) > 2 and sum(at_once) == len(answers)
    assert [len(row) for row in in_parts] == [len(answer) for answer in answers]
    assert in_parts == [pytest.approx(row, abs=1e-5) for row in whole]


def test_several_groups_are_measured_together_as_they_are_one_by_one(
    llama: Policy, neox: Policy, at_once: list[int]
) -> None:
    groups = [written_by(llama, "12", "13"), written_by(neox, "7", "12", "1"), written_by(llama, "12", "5", "x" * 9)]
    offered = [
        ForeignGroup(prompt, group) for prompt, group in zip(("2 + 10 = ", PROMPT, "what?"), groups, strict=True)
    ]
    offered.insert(1, ForeignGroup("x" * 100_000, groups[0]))
    together, apart = translator(llama, 0.5), translator(llama, 0.5)
    for reader in (together, apart):
        reader.observe_own([(-3.0,)] * 64)
    found = together.foreign_groups(offered)
    assert at_once == [8] and found[1] is None
    assert found == [apart.foreign(one.prompt, one.group) for one in offered]
    assert together.dropped == apart.dropped and together.num_answers_below_floor == apart.num_answers_below_floor
    assert together.foreign_groups([]) == []


def test_nothing_of_others_is_trained_on_before_there_is_a_floor(llama: Policy, neox: Policy) -> None:
    group = written_by(neox, "12", "13")
    reader = translator(llama, quantile=0.5)
    reader.observe_own([(-1e9,)] * 31)
    assert reader.foreign(PROMPT, group) is None and reader.dropped == {"no_floor_yet": 1}
    reader.observe_own([(-1e9,)])
    assert reader.foreign(PROMPT, group) is not None
    assert translator(llama, quantile=0.0).foreign(PROMPT, group) is not None, "without one it is not waited for"


def own_level_above(policy: Policy, *unlikely: str) -> list[tuple[float, ...]]:
    """Own answers of which these texts are just below the floor."""
    reader = translator(policy)
    ids = [(*policy.encode_answer(text), policy.eos_token_ids[0]) for text in unlikely]
    prompt = tuple(policy.encode_prompt(PROMPT))
    scored = reader._logprobs([(prompt, answer) for answer in ids])
    level = max(least_likely_stretch(row) + 7 / min(len(row), 16) for row in scored) + 0.01
    return [(level,) * len(ids[0])] * 64


JUNK = "zqxj~^zqxj~^"


@pytest.mark.parametrize("author_is_a_stranger", [True, False])
def test_answers_below_the_floor_are_counted_and_left_out_of_the_loss_but_not_of_the_baseline(
    llama: Policy, neox: Policy, author_is_a_stranger: bool
) -> None:
    group = written_by(neox if author_is_a_stranger else llama, "12", JUNK, "13", rewards=(1.0, 0.5, 0.0))
    reader = translator(llama, quantile=0.5)
    reader.observe_own(own_level_above(llama, JUNK))
    got = reader.foreign(PROMPT, group)
    assert got is not None and [r.text for r in got.group.rollouts if r.token_ids] == ["12", "13"]
    assert reader.num_answers_below_floor == 1
    first, second = training_sequences([got], TrainingSection(advantage="dr_grpo"), 64)
    assert (first.advantage, second.advantage) == (0.5, -0.5)  # 1 - .5 and 0 - .5
    first, second = training_sequences([got], TrainingSection(advantage="grpo"), 64)
    assert (first.advantage, second.advantage) == pytest.approx((1.0, -1.0), abs=1e-5), "the standard deviation is .5"
    assert first.scale == second.scale == 1 / (len(first.answer_ids) + len(second.answer_ids))


def test_right_answers_teach_also_where_all_wrong_ones_are_below_the_floor(llama: Policy) -> None:
    group = written_by(llama, "12", "13", JUNK, JUNK, rewards=(1.0, 1.0, 0.0, 0.0))
    reader = translator(llama, quantile=0.5)
    reader.observe_own(own_level_above(llama, JUNK))
    got = reader.foreign(PROMPT, group)
    assert got is not None
    taught = training_sequences([got], TrainingSection(advantage="dr_grpo"), 64)
    assert [sequence.advantage for sequence in taught] == [0.5, 0.5]


def test_a_group_whose_best_answers_are_below_the_floor_is_not_used(llama: Policy) -> None:
    """All that is left would be pushed down, and nothing up."""
    group = written_by(llama, "12", "13", JUNK, JUNK, rewards=(0.4, 0.0, 1.0, 1.0))
    reader = translator(llama, quantile=0.5)
    reader.observe_own(own_level_above(llama, JUNK))
    assert reader.foreign(PROMPT, group) is None and reader.dropped == {"nothing_usable": 1}
    reader.observe_own([(-1e9,) * 12] * 512)
    assert reader.foreign(PROMPT, group) is not None


def test_poisoned_style_of_the_own_lineage_is_left_out_whatever_log_probs_it_claims_and_told(llama: Policy) -> None:
    group = written_by(llama, "12", "13", JUNK, JUNK, rewards=(0.0, 0.0, 1.0, 1.0))
    told: list[tuple[str, float]] = []
    reader = RolloutConverter(llama, 0.5, 64, lambda author, bad: told.append((author, bad)))
    reader.observe_own(own_level_above(llama, JUNK))
    for claimed in (0.0, -20.0):
        rollouts = tuple(replace(r, logprobs=(claimed,) * len(r.token_ids)) for r in group.rollouts)
        assert reader.foreign(PROMPT, replace(group, rollouts=rollouts)) is None, "what is left has no signal"
    assert told == [(group.author, pytest.approx((0.5 - 0.25) / 0.75))] * 2
    assert reader.foreign(PROMPT, replace(group, rollouts=group.rollouts[:2] * 2)) is None  # no signal either
    assert len(told) == 2, "likely answers tell nothing of their author"


def test_an_author_whose_groups_are_of_no_use_loses_its_share_whatever_lineage_it_claims(
    llama: Policy, neox: Policy
) -> None:
    """Bodies of six groups with true rewards: in words that nobody here would write, or spelt in a way that no text shows."""
    reputation = Reputation(21_600.0, Clock())
    reader = RolloutConverter(llama, 0.5, 64, reputation.unlikely)
    reader.observe_own([(-0.1,) * 3] * 64)
    foreign = replace(written_by(neox, JUNK, "~^zqxj"), author="foreign")
    honest = written_by(llama, "12", "13")
    hidden = [replace(one, token_ids=(0, *one.token_ids), logprobs=(-1.0, *one.logprobs)) for one in honest.rollouts]
    for group in (foreign, replace(honest, author="sibling", rollouts=tuple(hidden))):
        for _ in range(8):
            reputation.admitted(group.author)
            for _ in range(6):
                assert reader.foreign(PROMPT, group) is None
        assert reputation.trust(group.author) < 0.25 and not reputation.is_banned(group.author)


def test_a_prompt_may_be_as_long_as_the_settings_say(make_policy: Callable[..., Policy]) -> None:
    num_tokens = len(make_policy().encode_prompt(PROMPT))
    policy, shorter = (make_policy(max_prompt_tokens=limit) for limit in (num_tokens, num_tokens - 1))
    group = written_by(policy, "12", "13")
    assert translator(policy).foreign(PROMPT, group) is not None
    reader = translator(shorter)
    assert reader.foreign(PROMPT, group) is None and reader.dropped == {"long_prompt": 1}


def test_a_group_needs_an_answer_that_reaches_the_level_of_success(llama: Policy) -> None:
    group = written_by(llama, "12", "13", rewards=(0.5, 0.0))
    assert translator(llama).foreign(PROMPT, group, success_level=0.5) is not None
    reader = translator(llama)
    assert reader.foreign(PROMPT, group, success_level=0.51) is None and reader.dropped == {"nothing_usable": 1}


def test_the_floor_is_a_quantile_of_own_answers_and_an_answer_at_it_is_kept() -> None:
    for quantile, own in ((0.5, -20.0), (0.53, 0.0)):  # of 64 own answers the 32nd and the 34th
        floor = LikelihoodFloor(quantile)
        floor.observe_own([(0.0, 0.0)] * 32 + [(-20.0, -20.0)] * 32)
        lowest = own - 7 / 2  # e^-7 for two tokens
        assert floor.bound(2) == lowest
        assert floor.admits((lowest, lowest)) and not floor.admits((lowest, lowest - 0.01))


def test_an_author_of_which_something_is_useful_is_not_reported_for_a_quarter_of_unlikely_answers(
    llama: Policy,
) -> None:
    group = written_by(llama, "12", "13", "14", "zqxj~^zqxj~^", rewards=(1.0, 0.0, 0.0, 1.0))
    prompt = tuple(llama.encode_prompt(PROMPT))
    unlikely = translator(llama)._logprobs([(prompt, group.rollouts[3].token_ids)])[0]
    reported: list[str] = []
    reader = RolloutConverter(llama, 0.5, 64, lambda author, bad: reported.append(author))
    above = least_likely_stretch(unlikely) + 7 / len(unlikely) + 0.01  # so that the floor is just above that answer
    reader.observe_own([(above,) * len(unlikely)] * 64)
    got = reader.foreign(PROMPT, group)
    assert got is not None and reported == []
    assert [bool(rollout.token_ids) for rollout in got.group.rollouts] == [True, True, True, False]


def test_a_prompt_too_long_for_the_own_template_is_counted(neox: Policy, llama: Policy) -> None:
    reader = translator(neox)
    assert reader.foreign("x" * 20_000, written_by(llama, "12", "13")) is None
    assert reader.dropped == {"long_prompt": 1}
