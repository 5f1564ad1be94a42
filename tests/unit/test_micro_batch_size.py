"""Which sequences go through the model together."""

import pytest

from swarm.policy.micro_batch_size import Extent, TokenSequence, cut


def answers(prompt: int, num_prompt_tokens: int, lengths: list[int]) -> list[TokenSequence]:
    return [([prompt] * num_prompt_tokens, [9] * length) for length in lengths]


def lengths_of(sequences: list[TokenSequence], parts: list[list[int]]) -> list[list[int]]:
    return [[len(sequences[index][1]) for index in part] for part in parts]


def test_siblings_with_short_answers_stay_together():
    sequences = answers(1, 100, [5, 7, 4]) + answers(2, 100, [6, 5, 5])
    assert cut(sequences, max_sequences=64, max_tokens=200) == [[0, 1, 2], [3, 4, 5]]


def test_long_answers_of_like_length_go_together():
    sequences = answers(1, 10, [1000, 20, 980]) + answers(2, 10, [30, 990, 25])
    parts = cut(sequences, max_sequences=64, max_tokens=3100)
    assert lengths_of(sequences, parts) == [[20, 25, 30], [980, 990, 1000]]


def test_no_part_is_larger_than_the_budget_but_a_single_longer_sequence():
    sequences = answers(1, 30, [300, 10, 290, 700, 15, 310, 20, 2000])
    parts = cut(sequences, max_sequences=3, max_tokens=700)
    assert sorted(index for part in parts for index in part) == list(range(8))
    for part in parts:
        extent = Extent.of([sequences[index] for index in part])
        assert extent.num_answers <= 3
        assert extent.tokens <= 700 or len(part) == 1
    assert [2000] in lengths_of(sequences, parts)


def test_a_part_may_have_exactly_the_budget():
    sequences = answers(1, 50, [50]) + answers(2, 50, [50])
    assert cut(sequences, max_sequences=2, max_tokens=200) == [[0, 1]]
    assert cut(sequences, max_sequences=2, max_tokens=199) == [[0], [1]]
    assert cut(sequences, max_sequences=1, max_tokens=200) == [[0], [1]]


@pytest.mark.parametrize(
    ("answer_tokens", "shares"), [(64, True), (256, True), (352, True), (353, False), (2048, False)]
)
def test_prompts_are_shared_where_a_fifth_of_the_tokens_is_saved(answer_tokens: int, shares: bool):
    # four answers to one prompt of 128: separate 4 · (128 + T), shared 128 + 4 · T
    extent = Extent(num_prompts=1, num_answers=4, prompt_tokens=128, answer_tokens=answer_tokens)
    assert extent.shares_prompts == shares
    assert extent.tokens == (int((128 + 4 * answer_tokens) / 0.8) if shares else 4 * (128 + answer_tokens))


def test_copies_of_a_prompt_may_be_bounded():
    """A stage of a pipeline refuses more than a multiple of `max_states`, counted with a prompt for each answer."""
    sequences = answers(1, 1024, [1] * 64)
    assert len(cut(sequences, max_sequences=64, max_tokens=4096)) == 1
    parts = cut(sequences, max_sequences=64, max_tokens=4096, max_separate_tokens=8 * 4096)
    assert [len(part) for part in parts] == [31, 31, 2]
