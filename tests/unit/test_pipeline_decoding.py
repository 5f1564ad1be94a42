"""A pipeline samples the answers of the single model, and the sessions of a stage are bounded."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.errors import NetworkError, PipelineError, StageLostError
from swarm.pipeline.commands import CloseBatchCommand, CommitCommand, DecodeCommand, ForwardCommand, StageSettings
from swarm.pipeline.driver.pipeline_policy import greedy
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.stage.stage_model import GrowingLayer
from swarm.pipeline.stage_link import InProcessLink
from tests.unit.pipeline_models import (
    ARCHITECTURES,
    LORA,
    PAD,
    load_stages,
    loss_of,
    made_up_parts,
    open_stage_group,
    single_model,
)

PROMPTS = ([5, 9, 17], [3], [8, 8, 41, 2, 77, 12, 30, 6], [60, 61, 62, 63, 64])
NUM_NEW = 12


@cache
def answers_alone(folder: Path) -> tuple[list[list[int]], set[int]]:
    """Return (greedy answers of the single model, tokens that end them: some rows early, one at once)."""
    whole = single_model(folder, LORA)
    plain = [alone(whole, prompt) for prompt in PROMPTS]
    eos = {plain[0][3], plain[2][0]}
    ended = [alone(whole, prompt, list(eos)) for prompt in PROMPTS]
    assert len({len(answer) for answer in ended}) > 1
    return ended, eos


@torch.no_grad()
def alone(model: Any, prompt: Sequence[int], eos: Sequence[int] = ()) -> list[int]:
    """Sample greedily without a cache, computing the whole row for every token."""
    row = list(prompt)
    for _ in range(NUM_NEW):
        row.append(int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
        if row[-1] in eos:
            break
    return row[len(prompt) :]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("sizes", [[2, 3], [1, 1, 2, 1]], ids=str)
async def test_greedy_answers_are_those_of_the_single_model(
    pipeline_models: dict[str, Path], name: str, sizes: list[int]
) -> None:
    wanted, eos = answers_alone(pipeline_models[name])
    async with open_stage_group(
        pipeline_models[name], sizes, LORA, like=single_model(pipeline_models[name], LORA)
    ) as opened:
        for num_sessions in (1, None):
            found = await opened.policy.generate(
                PROMPTS, greedy, max_new_tokens=NUM_NEW, eos_token_ids=eos, num_sessions=num_sessions
            )
            assert found == wanted
        # nothing is left behind
        for model, stage in zip(opened.models, opened.stages, strict=True):
            with pytest.raises(PipelineError, match="begun before"):
                stage.decode(DecodeCommand(1, torch.zeros(1, 1, model.width)))


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_logits_of_ragged_rows_are_those_of_each_alone(pipeline_models: dict[str, Path], name: str) -> None:
    """Left-padded rows, then repeated and reordered ones, like the siblings of a group."""
    whole = single_model(pipeline_models[name], LORA)
    longest = max(len(prompt) for prompt in PROMPTS)
    padding = tuple(longest - len(prompt) for prompt in PROMPTS)
    padded = torch.tensor([[PAD] * pad + prompt for pad, prompt in zip(padding, PROMPTS, strict=True)])

    @torch.no_grad()
    def wanted(rows: list[list[int]]) -> Tensor:
        return torch.stack([whole(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])

    async with open_stage_group(pipeline_models[name], [2, 3], LORA, like=whole) as opened:
        session = opened.stage_group.new_session()
        logits = await opened.stage_group.begin(session, padded, padding)
        torch.testing.assert_close(logits, wanted(list(PROMPTS)), rtol=0, atol=1e-5)
        order: list[int] | None = [3, 0, 0, 1, 3]
        rows = [[*PROMPTS[i]] for i in (3, 0, 0, 1, 3)]
        for step in range(8):  # beyond the short window of qwen2's later layers
            tokens = [(7 * step + 11 * i) % 90 for i in range(5)]
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
            logits = await opened.stage_group.extend(session, torch.tensor(tokens)[:, None], order)
            order = None
            torch.testing.assert_close(logits, wanted(rows), rtol=0, atol=1e-5)


async def test_a_stage_lost_in_decoding_is_named_and_the_others_forget(pipeline_models: dict[str, Path]) -> None:
    class Dying(InProcessLink):
        def __init__(self, link: InProcessLink) -> None:
            self.__dict__.update(link.__dict__)
            self._left = 5

        async def decode(self, command: DecodeCommand) -> Tensor:
            self._left -= 1
            if self._left < 0:
                raise NetworkError("connection reset")
            return await super().decode(command)

    def wrap(index: int, link: InProcessLink) -> InProcessLink:
        return Dying(link) if index == 1 else link

    async with open_stage_group(pipeline_models["llama"], [2, 3], LORA, wrap=wrap) as opened:
        with pytest.raises(StageLostError, match="stage 1 must answer to decode") as lost:
            await opened.policy.generate(PROMPTS, greedy, max_new_tokens=NUM_NEW, eos_token_ids=())
        assert lost.value.stages == (1,)
        for session in (1, 2):
            with pytest.raises(PipelineError, match="begun before"):
                opened.stages[0].decode(DecodeCommand(session, torch.zeros(2, 1, 32)))


async def test_sampling_hears_its_rows_and_steps(pipeline_models: dict[str, Path]) -> None:
    """The function that chooses tokens gets the prompt a row belongs to, so draws do not depend on the batch."""

    def choose(logits: Tensor, rows: Sequence[int], step: int) -> Tensor:
        assert logits.shape == (len(rows), 90)
        return torch.tensor([10 + row + step for row in rows])

    async with open_stage_group(pipeline_models["llama"], [2, 3], LORA) as opened:
        found = await opened.policy.generate(PROMPTS, choose, max_new_tokens=4, eos_token_ids={12})
    assert found == [[10, 11, 12], [11, 12], [12], [13, 14, 15, 16]]


def make_stage(pipeline_models: dict[str, Path], clock: Any = lambda: 0.0, **settings: Any) -> Stage:
    return Stage(load_stages(pipeline_models["llama"], [1, 3, 1], LORA)[1], StageSettings(**settings), clock=clock)


def begin(session: int, num_rows: int = 2, num_columns: int = 4) -> DecodeCommand:
    return DecodeCommand(session, torch.ones(num_rows, num_columns, 32), (0,) * num_rows)


def test_sessions_are_bounded_in_number_and_idle_ones_make_room(pipeline_models: dict[str, Path]) -> None:
    now = [0.0]
    stage = make_stage(pipeline_models, lambda: now[0], max_sessions=2, session_idle_s=60)
    stage.decode(begin(1))
    now[0] = 50
    stage.decode(begin(2))
    with pytest.raises(PipelineError, match="at most 2 sessions"):
        stage.decode(begin(3))
    now[0] = 61  # the first is idle for longer than a minute
    stage.decode(begin(3))
    for session, is_there in ((1, False), (2, True), (3, True)):
        command = DecodeCommand(session, torch.ones(2, 1, 32))
        if is_there:
            assert stage.decode(command).shape == (2, 1, 32)
        else:
            with pytest.raises(PipelineError, match="begun before"):
                stage.decode(command)


def test_sessions_are_bounded_in_bytes(pipeline_models: dict[str, Path]) -> None:
    token_bytes = 2 * 2 * 8 * 4 * 3  # keys and values, heads, head size, float32, layers
    stage = make_stage(pipeline_models, max_session_bytes=20 * token_bytes)
    stage.decode(begin(1, 2, 4))
    with pytest.raises(PipelineError, match=f"{20 * token_bytes} bytes, got {21 * token_bytes}"):
        stage.decode(begin(2, 1, 13))
    with pytest.raises(PipelineError, match="must fit"):
        stage.decode(DecodeCommand(1, torch.ones(6, 1, 32), rows=(0, 1) * 3))
    stage.decode(DecodeCommand(1, torch.ones(4, 1, 32), rows=(0, 1, 1, 0)))
    with pytest.raises(PipelineError, match="must fit"):
        stage.decode(DecodeCommand(1, torch.ones(4, 1, 32)))
    stage.end(1)
    assert stage.decode(begin(2, 1, 13)).shape == (1, 13, 32)


def test_what_a_command_takes_beside_its_states_is_bounded_before_it_is_made(pipeline_models: dict[str, Path]) -> None:
    stage = make_stage(pipeline_models, max_session_bytes=100_000)  # 384 bytes of keys and values for each column
    plain, padded = ((0,), (1,))
    assert stage.decode(DecodeCommand(1, torch.ones(1, 150, 32), plain)).shape == (1, 150, 32)
    stage.end(1)
    with pytest.raises(PipelineError, match=f"got {150 * 384 + 4 * 150**2}"):
        stage.decode(DecodeCommand(2, torch.ones(1, 150, 32), padded))
    stage.end(2)
    stage.decode(DecodeCommand(3, torch.ones(1, 1, 32), plain))
    with pytest.raises(PipelineError, match=f"got {150 * 384 + 4 * 149 * 150}"):
        stage.decode(DecodeCommand(3, torch.ones(1, 149, 32)))
    stage.end(3)
    head = Stage(load_stages(pipeline_models["llama"], [4, 1], LORA)[1], StageSettings(max_session_bytes=100_000))
    with pytest.raises(PipelineError, match=f"got {300 * 128 + 4 * 300 * 90}"):
        head.decode(DecodeCommand(1, torch.ones(300, 1, 32), plain * 300, is_last=True))


def test_a_sliding_window_needs_a_mask_in_training_too(pipeline_models: dict[str, Path]) -> None:
    model = load_stages(pipeline_models["llama"], [5], LORA)[0]
    assert model.mask_bytes(2, 64, 0, is_padded=False) == 0
    model._shell.config.layer_types, model._shell.config.sliding_window = ["sliding_attention"] * 5, 16
    assert model.mask_bytes(2, 64, 0, is_padded=False) == 4 * 2 * 64**2
    stage = Stage(model, StageSettings(max_session_bytes=4 * 2 * 64**2 - 1))
    with pytest.raises(PipelineError, match="a mask of a stage"):
        stage.forward(ForwardCommand(1, 0, torch.ones(2, 64, dtype=torch.long)))


def test_the_bytes_counted_are_those_of_the_cache(pipeline_models: dict[str, Path]) -> None:
    for name in ("llama", "gpt_neox"):
        model = load_stages(pipeline_models[name], [1, 3, 1], LORA)[1]
        cache: Any = model.new_cache()
        model.run(torch.ones(2, 5, 32), None, cache)
        held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
        assert held == 2 * 5 * model.cache_token_bytes


def test_odd_commands_are_refused(pipeline_models: dict[str, Path]) -> None:
    stage = make_stage(pipeline_models)
    for padding in ((0,), (0, 4), (0, -1)):
        with pytest.raises(PipelineError, match="left padding"):
            stage.decode(DecodeCommand(1, torch.ones(2, 4, 32), padding))
    stage.decode(begin(1))
    for rows in ((), (2,), (-1,)):
        with pytest.raises(PipelineError, match="rows must be among"):
            stage.decode(DecodeCommand(1, torch.ones(1, 1, 32), rows=rows))
    with pytest.raises(PipelineError, match="keep its 2 rows"):
        stage.decode(DecodeCommand(1, torch.ones(3, 1, 32)))
    stage.decode(DecodeCommand(1, torch.ones(2, 1, 32)))


def test_a_commit_ends_sessions_and_a_drop_does_not(pipeline_models: dict[str, Path]) -> None:
    stage = make_stage(pipeline_models)
    stage.decode(begin(1))
    stage.forward(ForwardCommand(1, 0, torch.ones(2, 4, 32)))
    stage.drop(1)
    stage.decode(DecodeCommand(1, torch.ones(2, 1, 32)))
    stage.forward(ForwardCommand(2, 0, torch.ones(2, 4, 32)))
    with pytest.raises(PipelineError, match="complete"):
        stage.close_batch(CloseBatchCommand(2, 1, ()))
    stage.drop(2)
    with pytest.raises(PipelineError, match="open"):
        stage.commit(CommitCommand(2, 0.1, 1.0, {}))
    stage.decode(DecodeCommand(1, torch.ones(2, 1, 32)))


async def test_keys_and_values_of_two_versions_do_not_mix(pipeline_models: dict[str, Path]) -> None:
    async with open_stage_group(pipeline_models["llama"], [2, 3], LORA) as opened:
        session = opened.stage_group.new_session()
        await opened.stage_group.begin(session, torch.tensor([[5, 6]]), (0,))
        await opened.policy.accumulate(made_up_parts(2), loss_of)
        await opened.stage_group.extend(session, torch.tensor([[7]]))  # not yet
        await opened.stage_group.commit(lr=1e-2, max_grad_norm=1.0)
        with pytest.raises(PipelineError, match="begin it again"):
            await opened.stage_group.extend(session, torch.tensor([[8]]))


def test_a_beginning_that_comes_after_the_end_leaves_nothing_behind(pipeline_models: dict[str, Path]) -> None:
    stage = make_stage(pipeline_models, max_sessions=1)
    stage.end(1)  # overtook the command it ends
    with pytest.raises(PipelineError, match="has ended"):
        stage.decode(begin(1))
    assert stage.decode(begin(2)).shape == (2, 4, 32)


async def test_a_pipeline_of_five_stages_decodes_in_five_sessions(
    pipeline_models: dict[str, Path],
) -> None:
    async with open_stage_group(pipeline_models["llama"], [1] * 5, LORA) as opened:
        answers = await opened.policy.generate([[5, 6], [7], [8], [9, 10], [11]], greedy, max_new_tokens=2)
        assert [len(answer) for answer in answers] == [2] * 5


def test_a_new_token_copies_no_earlier_keys_and_room_stays_below_a_quarter() -> None:
    generator = torch.Generator().manual_seed(1)
    layer, wanted = GrowingLayer(), torch.empty(3, 2, 0, 4)
    num_buffers, last = 0, 0
    for step in range(200):
        new = torch.randn(len(wanted), 2, 5 if step == 0 else 1, 4, generator=generator)
        wanted = torch.cat([wanted, new], dim=-2)
        keys, values = layer.update(new, -new)
        assert torch.equal(keys, wanted) and torch.equal(values, -wanted)
        room = layer._rooms[0]
        assert room is not None and room.shape[-2] <= 1.25 * wanted.shape[-2]
        num_buffers, last = num_buffers + (keys.data_ptr() != last), keys.data_ptr()
        if step == 100:  # the third row twice, the second one has ended
            layer.reorder_cache(torch.tensor([2, 2, 0]))
            wanted = wanted[[2, 2, 0]]
    assert num_buffers < 25
