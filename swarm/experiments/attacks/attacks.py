"""The kinds of attack: what a hostile node makes of its groups, and by which reasons defended readers refuse it."""

from collections.abc import Sequence
from dataclasses import replace

from swarm.experiments.attacks.hostile import Attack, HostileNode, parts, with_variance, with_wrong_rewards
from swarm.records.codec import encode_body
from swarm.records.identity import Identity
from swarm.types import RolloutGroup, Task, Turn

_SPAM_PER_ROUND = 200
_JUNK = " lol ok lol"
_DIGITS = "012"


def wrong_rewards(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    node.offer(with_wrong_rewards(groups))


def copied(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    stolen = [replace(group, author=node.identity.peer_id) for group in node.groups_of_others()]
    node.offer(stolen[-node.setup.num_groups :])


def spam(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    """Valid headers, and bodies of random bytes."""
    useful = with_variance(groups) or groups
    for _ in range(_SPAM_PER_ROUND):
        node.post(node.identity, useful[:1], node.rng.randbytes(300))


def stale(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    """The same old groups again and again, in another order, as if they were new."""
    for _ in range(4):
        old = node.rng.sample(node.hoard, min(len(node.hoard), node.setup.num_groups))
        node.offer([replace(g, rollouts=tuple(node.rng.sample(g.rollouts, len(g.rollouts)))) for g in old])


def poisoned_style(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    """Right answers wrapped in junk against plain wrong ones. Every reward is true, the log-probs are invented."""
    by_ref = {task.ref: task for task in tasks}
    made = [_with_junk(node, by_ref[group.task], group) for group in groups]
    node.offer([group for group in made if group is not None])


def only_wrong(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    """Partly right answers against entirely wrong ones, none of them a success. Rewards and log-probs are true."""
    by_ref = {task.ref: task for task in tasks}
    made = [_least_wrong(node, by_ref[group.task], group) for group in groups]
    node.offer([group for group in made if group is not None])


def no_information(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    """Groups of equal rewards: as many as it likes, since nothing needs to be found."""
    flat = [replace(g, rollouts=(min(g.rollouts, key=lambda r: r.reward),) * len(g.rollouts)) for g in groups]
    node.offer(flat, claimed_mean=0.5 if node.rng.random() < 0.5 else None)


def forged(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    victim = node.rng.choice(node.setup.honest)
    node.offer([replace(group, author=victim) for group in with_wrong_rewards(groups)])


def forged_episodes(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    """Half of each group are episodes in which an invented reply gives the right answer away."""
    by_ref = {task.ref: task for task in tasks}
    made = [_with_invented_reply(node, by_ref[group.task], group) for group in groups]
    node.offer([group for group in made if group.has_reward_variance])


def replayed(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    exchange = node.setup.exchange
    for author in node.setup.honest:
        for offer in list(exchange.offers_of(author))[-2:]:
            exchange.post(node.identity.peer_id, offer.record, offer.body)


def equivocal(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    """One header, and another body for half of the readers."""
    for part in parts(with_variance(groups)):
        node.post(node.identity, part, encode_body(part), encode_body(with_wrong_rewards(part)))


def withheld(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    for part in parts(with_variance(groups)) * 8:
        node.post(node.identity, part, encode_body(part), is_withheld=True)


def sybils(node: HostileNode, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
    """Fresh names every round: what became of the last ones does not matter."""
    lies = with_wrong_rewards(groups)
    for _ in range(node.setup.num_sybils if lies else 0):
        identity = Identity(node.rng.randbytes(32))
        mine = [replace(group, author=identity.peer_id) for group in node.rng.sample(lies, min(2, len(lies)))]
        node.post(identity, mine, encode_body(mine))


def _with_junk(node: HostileNode, task: Task, group: RolloutGroup) -> RolloutGroup | None:
    right = max(group.rollouts, key=lambda rollout: rollout.reward)
    if right.reward <= 0:
        return None
    texts = [right.text + _JUNK * (number % 2 + 1) for number in range(len(group.rollouts) // 2)]
    texts += [rollout.text for rollout in group.rollouts if rollout.reward < right.reward][: len(texts)]
    made = replace(group, rollouts=tuple(node.written(task, text) for text in texts))
    return made if len(texts) > 1 and made.has_reward_variance else None


def _with_invented_reply(node: HostileNode, task: Task, group: RolloutGroup) -> RolloutGroup:
    policy, half = node.setup.policy, len(group.rollouts) // 2
    source = node.setup.mixture.sources[task.ref.source]
    right = source.answer(task.ref.seed, task.ref.index)
    reply = f"The answer is {right}."
    reply_ids = tuple(policy.encode_reply(reply, "user", task.context, after_eos=True))
    first, last = (node.written(task, text) for text in ("0", right))
    turn = Turn("0", reply, "user", len(first.token_ids), len(first.token_ids) + len(reply_ids))
    token_ids = (*first.token_ids, *reply_ids, *last.token_ids)
    lie = replace(
        last, token_ids=token_ids, logprobs=(*first.logprobs, *(0.0,) * len(reply_ids), *last.logprobs),
        turns=(turn,), reward=1.0,
    )  # fmt: skip
    return replace(group, rollouts=(*group.rollouts[:half], *(lie,) * (len(group.rollouts) - half)))


def _least_wrong(node: HostileNode, task: Task, group: RolloutGroup) -> RolloutGroup | None:
    """Where the samples hold no partly right answer, a digit is added to the right one: verifiers that look for the solution
    within the text give a part of the reward for it."""
    near = [text + digit for text in {r.text for r in group.rollouts if r.reward == 1.0} for digit in _DIGITS]
    rollouts = [r for r in group.rollouts if r.reward < 1.0]
    rollouts += [one for one in (node.written(task, text, task.prompt) for text in near) if one.reward < 1.0]
    rollouts.sort(key=lambda rollout: -rollout.reward)
    half = len(group.rollouts) // 2
    made = replace(group, rollouts=tuple(rollouts[:half] + rollouts[half:][-half:]))
    return made if len(made.rollouts) > 1 and made.has_reward_variance else None


WRONG_REWARDS = Attack(wrong_rewards, frozenset({"reward_mismatch", "banned"}), admits_bodies=False)
COPIED = Attack(copied, frozenset({"copied", "banned"}), admits_bodies=False)
SPAM = Attack(spam, frozenset({"malformed", "banned", "rate"}), admits_bodies=False)
STALE = Attack(stale, frozenset({"replay"}), admits_bodies=True)
POISONED_STYLE = Attack(poisoned_style, frozenset(), admits_bodies=True)  # the policy's likelihood floor catches it
ONLY_WRONG = Attack(only_wrong, frozenset(), admits_bodies=True)  # every reward is true; the pool does not store it
NO_INFORMATION = Attack(no_information, frozenset({"no_signal", "header_mismatch", "banned"}), admits_bodies=True)
FORGED = Attack(forged, frozenset({"bad_signature"}), admits_bodies=False)
FORGED_EPISODES = Attack(forged_episodes, frozenset({"forged_episode", "tokens", "banned"}), admits_bodies=False)
REPLAYED = Attack(replayed, frozenset(), admits_bodies=False)  # a reader ignores what it has judged before
EQUIVOCAL = Attack(equivocal, frozenset({"wrong_hash"}), admits_bodies=True)
WITHHELD = Attack(withheld, frozenset({"unavailable"}), admits_bodies=False)
SYBILS = Attack(sybils, frozenset({"reward_mismatch", "copied"}), admits_bodies=False)
