"""Gradients and steps of a pipeline are those of the single model; a batch is applied whole, once, or not at all."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.config import LoraSection
from swarm.errors import NetworkError, PipelineError, StageLostError
from swarm.pipeline.commands import (
    Answers,
    BackwardCommand,
    CloseBatchCommand,
    CommitCommand,
    ForwardCommand,
    SharedPrompts,
    StageSettings,
)
from swarm.pipeline.driver.stage_group import StageGroupSettings
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.stage_link import InProcessLink
from swarm.policy.logprobs import TokenLogprobs, TokenSequence, token_logprobs
from tests.unit.pipeline_models import (
    ARCHITECTURES,
    LORA,
    PAD,
    TestStageGroup,
    largest_difference,
    load_stages,
    loss_of,
    made_up_parts,
    norm_of,
    open_stage_group,
    single_gradients,
    single_model,
    trainable,
)

FULL_AND_LORA = pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])


def gradients(opened: TestStageGroup) -> dict[str, Tensor]:
    """Return the gradients of all stages, with those of copies added up."""
    found: dict[str, Tensor] = {}
    for model in opened.models:
        for name, parameter in model.trainable.items():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


def weights(opened: TestStageGroup) -> list[dict[str, Tensor]]:
    return [{name: p.detach().clone() for name, p in model.trainable.items()} for model in opened.models]


def are_equal(one: Sequence[dict[str, Tensor]], other: Sequence[dict[str, Tensor]]) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


@FULL_AND_LORA
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", [5]), *((name, sizes) for name in ARCHITECTURES for sizes in ([1, 4], [2, 1, 1, 1]))],
    ids=str,
)
async def test_gradients_are_those_of_the_single_model(
    pipeline_models: dict[str, Path], name: str, sizes: list[int], lora: LoraSection | None
) -> None:
    whole, parts = single_model(pipeline_models[name], lora), made_up_parts(5)
    async with open_stage_group(pipeline_models[name], sizes, lora, like=whole) as opened:
        gradient = await opened.policy.accumulate(parts, loss_of)
        found = gradients(opened)
    wanted = single_gradients(whole, lora, parts)
    assert largest_difference(found, wanted) < 1e-5
    assert gradient.norm == pytest.approx(norm_of(wanted), rel=1e-5)


def siblings() -> list[list[TokenSequence]]:
    """Make a micro-batch of two prompts with several answers each, one of one token, and one whose answers all have one."""
    prompts = [list(range(5, 23)), list(range(30, 41))]
    answers = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [7, 7]]
    return [
        [(prompt, answer) for answer in answers for prompt in prompts],
        [(prompts[0], [token]) for token in (3, 4, 5)],
    ]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_siblings_share_their_prompt_and_the_gradient_stays(
    pipeline_models: dict[str, Path], name: str, recompute: bool
) -> None:
    whole, parts, sent = single_model(pipeline_models[name], LORA), siblings(), list[ForwardCommand]()

    class Observed(InProcessLink):
        async def forward(self, command: ForwardCommand) -> Tensor | TokenLogprobs:
            sent.append(command)
            return await super().forward(command)

    settings = StageSettings(recompute=recompute)
    async with open_stage_group(
        pipeline_models[name], [2, 1, 2], LORA, like=whole, stage_settings=settings,
        wrap=lambda _, link: Observed(link._stage),
    ) as opened:  # fmt: skip
        gradient = await opened.policy.accumulate(parts, loss_of)
        found = gradients(opened)
        scored = await opened.policy.token_logprobs(parts, with_entropy=True)
    wanted = single_gradients(whole, LORA, parts)
    assert largest_difference(found, wanted) < 1e-5
    assert gradient.norm == pytest.approx(norm_of(wanted), rel=1e-5)
    for part, result in zip(parts, scored, strict=True):
        with torch.no_grad():
            alone = token_logprobs(whole, part, PAD, with_entropy=True, share_prompts=False)
        torch.testing.assert_close(result.logprobs, alone.logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(result.entropy, alone.entropy, rtol=0, atol=1e-5)
    columns = {command.states.shape[:2] for command in sent}
    assert columns == {(1, 2 * 18 + 8 * 4), (1, 18 + 3)}, "each prompt once, and not for each answer"


def test_a_row_of_prompts_and_answers_must_be_whole_and_bounded(pipeline_models: dict[str, Path]) -> None:
    (model,) = load_stages(pipeline_models["llama"], [5], LORA)
    stage, ids = Stage(model, StageSettings(max_states=10)), torch.ones(1, 10, dtype=torch.long)
    fits = SharedPrompts((0, 1), (0, 1, 1), 2)
    answers = Answers((1, 3, 3), ((1, 2), (3,), (4, 5, 6)))
    assert stage.forward(ForwardCommand(0, 0, ids, answers=answers, shared=fits)).logprobs.shape == (3, 3)
    odd = [
        (SharedPrompts((0, 1), (0, 1, 2), 2), "name one of 2 prompts"),
        (SharedPrompts((0, 2), (0, 1, 1), 2), "at least one token"),
        (SharedPrompts((0,), (0, 0, 0), 2), "whole prompts and answers"),
        (SharedPrompts((), (0, 0), 2), "whole prompts and answers"),
        (SharedPrompts((0,), (), 2), "whole prompts and answers"),
        (SharedPrompts((0,), (0,) * 9, 0), "whole prompts and answers"),
        (SharedPrompts((0,), (0,) * 2, 12), "whole prompts and answers"),
        (SharedPrompts((0,), (0,) * 10, 1 << 61), "whole prompts and answers"),
    ]
    for shared, reason in odd:
        with pytest.raises(PipelineError, match=reason):
            stage.forward(ForwardCommand(1, 0, ids, shared=shared))
    with pytest.raises(PipelineError, match="whole prompts and answers"):
        stage.forward(ForwardCommand(1, 0, torch.ones(2, 5, dtype=torch.long), shared=fits))
    with pytest.raises(PipelineError, match=r"20 answers .* at most 320 columns together, got 21 each"):
        Stage(model, StageSettings(max_states=40)).forward(
            ForwardCommand(1, 0, torch.ones(1, 40, dtype=torch.long), shared=SharedPrompts((0,), (0,) * 20, 20))
        )
    for starts, lengths in (((4, 3, 3), (1, 1, 1)), ((1, 3, 3), (1, 1, 4)), ((1, 3), (1, 1))):
        rows = tuple((1,) * length for length in lengths)
        with pytest.raises(PipelineError, match=r"answers must lie|must have a start"):
            stage.forward(ForwardCommand(0, 0, ids, answers=Answers(starts, rows), shared=fits))


async def test_recomputing_in_the_backward_pass_gives_the_same(pipeline_models: dict[str, Path]) -> None:
    name = "llama"
    whole, parts = single_model(pipeline_models[name], LORA), made_up_parts(3)
    async with open_stage_group(
        pipeline_models[name], [2, 3], LORA, like=whole, stage_settings=StageSettings(recompute=True)
    ) as opened:
        await opened.policy.accumulate(parts, loss_of)
        assert largest_difference(gradients(opened), single_gradients(whole, LORA, parts)) < 1e-5


@FULL_AND_LORA
async def test_clipped_steps_are_those_of_the_single_model(
    pipeline_models: dict[str, Path], lora: LoraSection | None
) -> None:
    """Three steps of AdamW with a norm that is clipped over all stages, with the tied head."""
    whole = single_model(pipeline_models["llama"], lora)
    own = trainable(whole, lora)
    optimizer = torch.optim.AdamW(own.values(), lr=1e-3, weight_decay=0.1, fused=True)
    async with open_stage_group(
        pipeline_models["llama"], [2, 1, 2], lora, like=whole, stage_settings=StageSettings(weight_decay=0.1)
    ) as opened:
        for step in range(3):
            parts = made_up_parts(4, seed=step)
            single_gradients(whole, lora, parts)
            norm = torch.nn.utils.clip_grad_norm_(own.values(), 0.05).item()
            assert norm > 0.1, "nothing would be clipped"
            optimizer.step()
            gradient = await opened.policy.accumulate(parts, loss_of)
            assert gradient.norm == pytest.approx(norm, rel=1e-4)
            assert await opened.stage_group.commit(lr=1e-3, max_grad_norm=0.05) == step + 1
        for model in opened.models:
            for name, parameter in model.trainable.items():
                # Adam's first steps are ±lr whatever the gradient: where it is rounding noise, signs may differ
                assert (parameter - own[name]).abs().max() < 6e-3
                assert (parameter - own[name]).abs().mean() < 1e-6
        if lora is None:
            name = "model.embed_tokens.weight"
            assert torch.equal(opened.models[0].trainable[name], opened.models[-1].trainable[name])


async def test_logprobs_are_those_of_the_single_model(pipeline_models: dict[str, Path]) -> None:
    for name in ARCHITECTURES:
        whole, parts = single_model(pipeline_models[name], LORA), made_up_parts(4)
        async with open_stage_group(pipeline_models[name], [1, 3, 1], LORA, like=whole) as opened:
            found = await opened.policy.token_logprobs(parts, temperature=0.7, with_entropy=True)
        for part, result in zip(parts, found, strict=True):
            with torch.no_grad():
                wanted = token_logprobs(whole, part, PAD, 0.7, with_entropy=True)
            torch.testing.assert_close(result.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
            torch.testing.assert_close(result.entropy, wanted.entropy, rtol=0, atol=1e-5)
            assert torch.equal(result.mask, wanted.mask)


@pytest.mark.parametrize(("precision", "low", "high"), [("bf16", 1e-4, 0.05), ("int8", 1e-3, 0.2)])
async def test_coarser_wires_bend_the_gradient_a_little(
    pipeline_models: dict[str, Path], precision: Any, low: float, high: float
) -> None:
    whole, parts = single_model(pipeline_models["llama"], LORA), made_up_parts(3)
    async with open_stage_group(pipeline_models["llama"], [2, 3], LORA, like=whole, precision=precision) as opened:
        await opened.policy.accumulate(parts, loss_of)
        found = gradients(opened)
    wanted = single_gradients(whole, LORA, parts)
    error = norm_of({name: found[name] - wanted[name] for name in wanted}) / norm_of(wanted)
    assert low < error < high


async def test_swapped_edges_train_the_model_in_the_other_order(pipeline_models: dict[str, Path]) -> None:
    """Every other micro-batch goes through layers 1, 0, 2, 4, 3; the ends are replicated and stay equal."""
    parts = made_up_parts(4)
    sizes, settings = [1, 1, 1, 1, 1], StageGroupSettings(swap_edges=True)
    whole, other = single_model(pipeline_models["gpt_neox"], None), single_model(pipeline_models["gpt_neox"], None)
    layers = other.gpt_neox.layers
    other.gpt_neox.layers = torch.nn.ModuleList([layers[i] for i in (1, 0, 2, 4, 3)])
    for index, part in enumerate(parts):
        model = whole if index % 2 == 0 else other
        loss_of(index, token_logprobs(model, part, PAD, share_prompts=False)).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    places = {"0": "1", "1": "0", "2": "2", "3": "4", "4": "3"}
    for name, parameter in other.named_parameters():
        head, _, rest = name.partition(".layers.")
        index, _, tail = rest.partition(".")
        wanted[f"{head}.layers.{places[index]}.{tail}" if rest else name] += parameter.grad
    async with open_stage_group(
        pipeline_models["gpt_neox"], sizes, None, like=whole, group_settings=settings, replicate_edges=True
    ) as opened:
        gradient = await opened.policy.accumulate(parts, loss_of)
        assert largest_difference(gradients(opened), wanted) < 1e-5
        assert gradient.norm == pytest.approx(norm_of(wanted), rel=1e-5)
        await opened.stage_group.commit(lr=1e-2, max_grad_norm=1.0)
        first, second = (opened.models[i].trainable["gpt_neox.embed_in.weight"] for i in (0, 1))
        assert torch.equal(first, second)


async def test_the_base_is_scored_with_the_adapter_switched_off(pipeline_models: dict[str, Path]) -> None:
    folder, parts = pipeline_models["qwen2"], made_up_parts(2)
    base, whole = single_model(folder, None), single_model(folder, LORA)
    async with open_stage_group(folder, [2, 3], LORA, like=whole) as opened:
        found = await opened.policy.token_logprobs(parts, without_adapter=True)
        (plain, _) = await opened.policy.token_logprobs(parts)
    with torch.no_grad():
        wanted = [token_logprobs(base, part, PAD) for part in parts]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
    assert (plain.logprobs - found[0].logprobs).abs().max() > 1e-2, "and back on again"
    async with open_stage_group(folder, [2, 3], None) as opened:
        with pytest.raises(PipelineError, match="need a frozen base"):
            await opened.policy.token_logprobs(parts, without_adapter=True)


class Faulty(InProcessLink):
    """Fails the command `what` at its `nth` time, as often as requested; `dead` fails everything from then on."""

    def __init__(self, link: InProcessLink, what: str, nth: int, *, dead: bool = False, after: bool = False) -> None:
        self.__dict__.update(link.__dict__)
        self._what, self._left, self._dead, self._after, self._is_dead = what, nth, dead, after, False

    async def _do(self, work: Any) -> Any:
        if self._is_dead:
            raise NetworkError("connection refused")
        return await super()._do(work)

    async def _maybe(self, what: str, work: Any) -> Any:
        if what == self._what:
            self._left -= 1
            if self._left == 0:
                if self._after:
                    await work
                else:
                    work.close()
                self._is_dead = self._dead
                raise NetworkError("connection reset")
        return await work

    async def forward(self, command: Any) -> Any:
        return await self._maybe("forward", super().forward(command))

    async def backward(self, command: Any) -> Any:
        return await self._maybe("backward", super().backward(command))

    async def close_batch(self, command: Any) -> Any:
        return await self._maybe("settle", super().close_batch(command))

    async def commit(self, command: Any) -> Any:
        return await self._maybe("commit", super().commit(command))


@pytest.mark.parametrize(
    ("what", "nth", "stage"),
    [("forward", 3, 0), ("forward", 1, 2), ("backward", 1, 1), ("backward", 4, 0), ("settle", 1, 2)],
)
async def test_a_lost_stage_drops_the_batch_everywhere(
    pipeline_models: dict[str, Path], stage: int, what: str, nth: int
) -> None:
    parts = made_up_parts(4)

    def wrap(index: int, link: InProcessLink) -> InProcessLink:
        return Faulty(link, what, nth) if index == stage else link

    async with open_stage_group(pipeline_models["llama"], [2, 1, 2], LORA, wrap=wrap) as opened:
        before = weights(opened)
        with pytest.raises(StageLostError, match=f"stage {stage} must answer to {what}") as lost:
            await opened.policy.accumulate(parts, loss_of)
        assert lost.value.stages == (stage,)
        assert not lost.value.applied
        assert are_equal(weights(opened), before)
        assert [one.num_in_flight for one in opened.stages] == [0, 0, 0]
        assert not gradients(opened)
        # the fault was a short one: the same batch, redone, gives the gradient it would have given
        await opened.policy.accumulate(parts, loss_of)
        redone = gradients(opened)
        async with open_stage_group(pipeline_models["llama"], [2, 1, 2], LORA) as fresh:
            await fresh.policy.accumulate(parts, loss_of)
            assert largest_difference(redone, gradients(fresh)) == 0


async def test_a_stage_that_is_too_slow_is_lost(pipeline_models: dict[str, Path]) -> None:
    release = asyncio.Event()

    class Slow(Faulty):
        async def forward(self, command: Any) -> Any:
            await release.wait()

    def wrap(index: int, link: InProcessLink) -> InProcessLink:
        return Slow(link, "", 0) if index == 1 else link

    settings = StageGroupSettings(action_timeout_s=1.0)  # enough for all the others, even on a busy machine
    async with open_stage_group(pipeline_models["llama"], [2, 3], LORA, wrap=wrap, group_settings=settings) as opened:
        with pytest.raises(StageLostError, match="stage 1 must answer to forward, got no answer within 1 s"):
            await opened.policy.accumulate(made_up_parts(2), loss_of)


async def test_a_commit_whose_answer_is_lost_is_applied_once(pipeline_models: dict[str, Path]) -> None:
    parts = made_up_parts(3)

    def wrap(index: int, link: InProcessLink) -> InProcessLink:
        return Faulty(link, "commit", 1, after=True) if index == 1 else link

    async with (
        open_stage_group(pipeline_models["llama"], [2, 3], LORA, wrap=wrap) as opened,
        open_stage_group(pipeline_models["llama"], [2, 3], LORA) as calm,
    ):
        for one in (opened, calm):
            await one.policy.accumulate(parts, loss_of)
            assert await one.stage_group.commit(lr=1e-2, max_grad_norm=1.0) == 1
        assert are_equal(weights(opened), weights(calm))


async def test_a_stage_lost_at_the_commit_is_named_and_the_others_have_applied(
    pipeline_models: dict[str, Path],
) -> None:
    def wrap(index: int, link: InProcessLink) -> InProcessLink:
        return Faulty(link, "commit", 1, dead=True) if index == 1 else link

    async with open_stage_group(pipeline_models["llama"], [2, 1, 2], LORA, wrap=wrap) as opened:
        await opened.policy.accumulate(made_up_parts(3), loss_of)
        with pytest.raises(StageLostError, match="for version 1") as lost:
            await opened.stage_group.commit(lr=1e-2, max_grad_norm=1.0)
        assert lost.value.stages == (1,)
        assert lost.value.applied
        assert [one.version for one in opened.stages] == [1, 0, 1]
        # another machine takes the place, with weights rebuilt for the version that the others are at
        model = load_stages(pipeline_models["llama"], [2, 1, 2], LORA)[1]
        stage = Stage(model, StageSettings())
        stage.recover({name: p.detach().clone() for name, p in model.trainable.items()}, opened.stage_group.version, {})
        link = InProcessLink(stage)
        await opened.stage_group.replace(1, link)
        await opened.policy.accumulate(made_up_parts(3), loss_of)
        assert await opened.stage_group.commit(lr=1e-2, max_grad_norm=1.0) == 2
        link.close()


async def test_a_loss_that_fails_or_is_not_finite_leaves_no_trace(pipeline_models: dict[str, Path]) -> None:
    def failing(micro_batch: int, result: TokenLogprobs) -> Tensor:
        if micro_batch == 1:
            raise PipelineError("no loss")
        return loss_of(micro_batch, result)

    def infinite(micro_batch: int, result: TokenLogprobs) -> Tensor:
        return loss_of(micro_batch, result) * (float("nan") if micro_batch == 2 else 1.0)

    async with open_stage_group(pipeline_models["llama"], [2, 3], LORA) as opened:
        before = weights(opened)
        with pytest.raises(PipelineError, match="no loss"):
            await opened.policy.accumulate(made_up_parts(3), failing)
        with pytest.raises(PipelineError, match="finite"):
            await opened.policy.accumulate(made_up_parts(3), infinite)
        with pytest.raises(PipelineError, match="closed and finite"):
            await opened.stage_group.commit(lr=1e-2, max_grad_norm=1.0)
        await opened.policy.accumulate(made_up_parts(3), loss_of)
        await opened.stage_group.drop()
        with pytest.raises(PipelineError, match="closed"):
            await opened.stage_group.commit(lr=1e-2, max_grad_norm=1.0)
        assert are_equal(weights(opened), before)
        assert not gradients(opened)


def hidden_stage(pipeline_models: dict[str, Path], **settings: Any) -> Stage:
    return Stage(load_stages(pipeline_models["llama"], [1, 3, 1], LORA)[1], StageSettings(**settings))


HIDDEN = torch.ones(2, 4, 32)


def test_a_stage_applies_only_what_is_whole(pipeline_models: dict[str, Path]) -> None:
    stage = hidden_stage(pipeline_models)
    stage.forward(ForwardCommand(1, 0, HIDDEN))
    stage.forward(ForwardCommand(1, 1, HIDDEN))
    stage.backward(BackwardCommand(1, 0, HIDDEN))
    with pytest.raises(PipelineError, match="1 of 2 micro-batches and 1 in flight"):
        stage.close_batch(CloseBatchCommand(1, 2, ()))
    with pytest.raises(PipelineError, match="closed before"):
        stage.commit(CommitCommand(1, 0.1, 1.0, {}))
    stage.backward(BackwardCommand(1, 1, HIDDEN))
    with pytest.raises(PipelineError, match="2 of 3"):
        stage.close_batch(CloseBatchCommand(1, 3, ()))
    stage.close_batch(CloseBatchCommand(1, 2, ()))
    with pytest.raises(PipelineError, match="newer"):
        stage.forward(ForwardCommand(1, 2, HIDDEN))
    with pytest.raises(PipelineError, match="scale"):
        stage.commit(CommitCommand(1, 0.1, float("nan"), {}))
    assert stage.commit(CommitCommand(1, 0.1, 1.0, {})) == 1
    assert stage.commit(CommitCommand(1, 0.1, 1.0, {})) == 1, "once however often"


def test_copies_are_stepped_with_the_sum_or_not_at_all(pipeline_models: dict[str, Path]) -> None:
    """A stage never steps a shared parameter with its own share of the gradient alone."""
    model = load_stages(pipeline_models["llama"], [2, 3], None)[0]
    stage, name = Stage(model, StageSettings()), "model.embed_tokens.weight"
    stage.forward(ForwardCommand(1, 0, torch.ones(1, 3, dtype=torch.long)))
    stage.backward(BackwardCommand(1, 0, torch.ones(1, 3, 32)))
    gradient = stage.close_batch(CloseBatchCommand(1, 1, (name,)))
    before = model.trainable[name].detach().clone()
    for gradients in ({}, {name: torch.ones(2, 2)}, {"lm_head.weight": torch.ones(2, 2)}):
        with pytest.raises(PipelineError, match="shared gradient"):
            stage.commit(CommitCommand(1, 0.1, 1.0, gradients))
    assert torch.equal(model.trainable[name], before)
    stage.commit(CommitCommand(1, 0.1, 1.0, gradient.shared_gradients))
    assert not torch.equal(model.trainable[name], before)


def test_late_commands_do_not_revive_a_batch(pipeline_models: dict[str, Path]) -> None:
    stage = hidden_stage(pipeline_models)
    stage.forward(ForwardCommand(3, 0, HIDDEN))
    stage.drop(3)
    for command in (ForwardCommand(3, 1, HIDDEN), ForwardCommand(2, 0, HIDDEN)):
        with pytest.raises(PipelineError, match="newer than the last"):
            stage.forward(command)
    with pytest.raises(PipelineError, match="is not open"):
        stage.backward(BackwardCommand(3, 0, HIDDEN))
    stage.forward(ForwardCommand(5, 0, HIDDEN))
    stage.drop(4)  # late: an older one
    assert stage.num_in_flight == 1
    stage.forward(ForwardCommand(6, 0, HIDDEN))  # its pipeline gave up 5
    assert stage.num_in_flight == 1
    with pytest.raises(PipelineError, match="is not open"):
        stage.backward(BackwardCommand(5, 0, HIDDEN))
    stage.drop(7)  # before anything of it came
    with pytest.raises(PipelineError, match="newer"):
        stage.forward(ForwardCommand(7, 0, HIDDEN))
    assert stage.describe().last_batch == 7


def test_a_stage_refuses_what_it_cannot_hold(pipeline_models: dict[str, Path]) -> None:
    stage = hidden_stage(pipeline_models, max_in_flight=1, max_states=8)
    stage.forward(ForwardCommand(1, 0, HIDDEN))
    for command, rule in (
        (ForwardCommand(1, 1, HIDDEN), "at most 1 micro-batches"),
        (ForwardCommand(1, 0, HIDDEN), "computed once"),
        (ForwardCommand(1, 1, torch.ones(3, 3, 32)), r"B·L in \[1, 8\]"),
        (ForwardCommand(1, 1, torch.ones(2, 4, 31)), r"hidden \[B, L, 32\]"),
        (ForwardCommand(1, 1, torch.ones(2, 4, dtype=torch.int32)), "states must be ids"),
        (ForwardCommand(0, 0, torch.full((2, 4), 90)), r"token ids must be in \[0, 90\)"),
    ):
        with pytest.raises(PipelineError, match=rule):
            stage.forward(command)
    with pytest.raises(PipelineError, match="gradient must have shape"):
        stage.backward(BackwardCommand(1, 0, torch.ones(2, 3, 32)))
    with pytest.raises(PipelineError, match="before its backward"):
        stage.backward(BackwardCommand(1, 9, HIDDEN))
    assert stage.backward(BackwardCommand(1, 0, HIDDEN)) is not None, "refused commands change nothing"


def test_a_stage_continues_from_its_state(pipeline_models: dict[str, Path]) -> None:
    def step(stage: Stage, batch: int) -> dict[str, Tensor]:
        stage.forward(ForwardCommand(batch, 0, HIDDEN * batch))
        stage.backward(BackwardCommand(batch, 0, HIDDEN.cumsum(-1)))
        stage.close_batch(CloseBatchCommand(batch, 1, ()))
        stage.commit(CommitCommand(batch, 1e-2, 1.0, {}))
        return stage.state()[0]["adapter"]

    stage, resumed = hidden_stage(pipeline_models), hidden_stage(pipeline_models)
    step(stage, 1)
    resumed.restore(*stage.state())
    wanted = step(stage, 2)
    found = step(resumed, 2)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert resumed.version == 2
    tensors, rest = stage.state()
    name = next(iter(wanted))
    with pytest.raises(PipelineError, match="difference at"):
        resumed.restore({"adapter": {}, "optimizer": {}}, rest)
    with pytest.raises(PipelineError, match="finite"):
        resumed.recover(tensors["adapter"] | {name: wanted[name] * float("nan")}, 2, {})


def test_a_rebuilt_stage_starts_its_optimizer_anew_and_a_tenth_faster(pipeline_models: dict[str, Path]) -> None:
    """A first step of AdamW moves every weight with a gradient by the learning rate."""
    stage = hidden_stage(pipeline_models)
    before, _ = stage.state()
    for _ in range(2):  # lost twice: the factor does not grow
        stage.recover(before["adapter"], 7, {})
    stage.forward(ForwardCommand(1, 0, HIDDEN))
    stage.backward(BackwardCommand(1, 0, HIDDEN.cumsum(-1)))
    stage.close_batch(CloseBatchCommand(1, 1, ()))
    assert stage.commit(CommitCommand(1, 1e-2, 1.0, {})) == 8
    moved = [
        (stage.state()[0]["adapter"][name] - value).abs().max().item() for name, value in before["adapter"].items()
    ]
    assert max(moved) == pytest.approx(1.1e-2, rel=1e-3)
    assert stage.state()[1]["lr_factor"] == 1.1
