"""Every extension point of swarm with its built-in implementations, one line each. See docs/extending.md.

To add one: write it in a file of its own, and add its line here. A package adds its own by an entry point instead.
"""

from swarm.errors import TaskError
from swarm.extensions.registry import BuiltIn, Registry

ODD_GROUPS = "odd groups"
"""An advantage with this trait needs groups of an odd size."""
WEIGHS = "weighs"
"""A correction with this trait multiplies by w, beside leaving answers out."""

TASK_SOURCES = Registry(
    "a task source",
    (
        BuiltIn(
            "reasoning_gym",
            "swarm.tasks.reasoning_gym_source:ReasoningGymSource",
            "a procedural data set of reasoning-gym",
        ),
        BuiltIn("jsonl", "swarm.tasks.jsonl_source:JsonlSource", "a file of your own"),
        BuiltIn("dataset", "swarm.tasks.data_sets.source:DatasetSource", "a data set in files of your own or on a hub"),
        BuiltIn("code", "swarm.tasks.code_source:CodeSource", "functions to write that are run in a sandbox"),
        BuiltIn("game", "swarm.tasks.environments.games:GameSource", "a game of several turns"),
    ),
    group="swarm.task_sources",
    error=TaskError,
    needs_isolation=True,
)
VERIFIERS = Registry(
    "a verifier",
    (
        BuiltIn("exact", "swarm.tasks.verifiers:EXACT", "the text equals the answer"),
        BuiltIn("numeric", "swarm.tasks.verifiers:NUMERIC", "the last number of the text equals the answer"),
        BuiltIn("regex", "swarm.tasks.verifiers:REGEX", "the text matches the answer, a pattern of RE2"),
        BuiltIn(
            "math",
            "swarm.tasks.mathematics.math_verifier:MATH",
            "the text equals the answer in mathematics, both in LaTeX",
        ),
    ),
    error=TaskError,
    needs_isolation=True,
)
TOOLS = Registry(
    "a tool",
    (
        BuiltIn("calculator", "swarm.tasks.environments.calculator:Calculator", "exact arithmetic"),
        BuiltIn("python", "swarm.tasks.environments.python_tool:PythonTool", "programs, run in the sandbox"),
        BuiltIn(
            "search", "swarm.tasks.environments.search_tool:SearchTool", "passages of the texts in `search_folder`"
        ),
    ),
    error=TaskError,
    needs_isolation=True,
)
FINAL_ANSWERS = Registry(
    "a rule for final answers",
    (
        BuiltIn("whole", "swarm.tasks.final_answers:Whole", "the whole text"),
        BuiltIn("last_line", "swarm.tasks.final_answers:LastLine", "the last line that is not empty"),
        BuiltIn("last_number", "swarm.tasks.final_answers:LastNumber", "the last number, as `numeric` reads it"),
        BuiltIn("tag", "swarm.tasks.final_answers:Tag", "what the last <answer>…</answer> holds"),
        BuiltIn("boxed", "swarm.tasks.final_answers:Boxed", "what the last \\boxed{…} holds"),
        BuiltIn("after_think", "swarm.tasks.final_answers:AfterThink", "what follows the last </think>"),
        BuiltIn("pattern", "swarm.tasks.final_answers:PatternGroup", "the group of the last match of a pattern of RE2"),
    ),
    error=TaskError,
)
REWARDS = Registry(
    "a reward function",
    (
        BuiltIn("format", "swarm.tasks.signalled_source:Format", "the form of the whole text"),
        BuiltIn("length", "swarm.tasks.signalled_source:Length", "a soft limit of its length"),
    ),
    group="swarm.rewards",
    error=TaskError,
)
TASK_CHOICES = Registry(
    "a task choice",
    (
        BuiltIn("weighted", "swarm.tasks.task_cursor:WeightedChoice", "sources by their weight"),
        BuiltIn(
            "thompson",
            "swarm.tasks.task_cursor:ThompsonChoice",
            "rather sources that are neither solved nor hopeless (VADE, 2511.18902)",
        ),
    ),
)
ADVANTAGES = Registry(
    "an advantage",
    (
        BuiltIn("grpo", "swarm.training.advantages:Grpo", "(R - mean) / std"),
        BuiltIn("dr_grpo", "swarm.training.advantages:DrGrpo", "R - mean"),
        BuiltIn("median", "swarm.training.advantages:Median", "R - median, odd group_size", frozenset({ODD_GROUPS})),
        BuiltIn("gdpo", "swarm.training.advantages:Gdpo", "by signal, then by batch"),
        BuiltIn(
            "gigpo", "swarm.training.advantages:Gigpo", "grpo, and again among turns of episodes from equal states"
        ),
    ),
    group="swarm.advantages",
)
CORRECTIONS = Registry(
    "a correction",
    (
        BuiltIn("none", "swarm.training.corrections:NoCorrection", "1"),
        BuiltIn("tis", "swarm.training.corrections:Truncated", "min(w, C)", frozenset({WEIGHS})),
        BuiltIn("icepop", "swarm.training.corrections:Banded", "w within [1/C, C], else 0", frozenset({WEIGHS})),
        BuiltIn("sequence_mask", "swarm.training.corrections:SequenceMask", "0 for answers whose mean w is outside [1/C, C]"),
        BuiltIn("opsm", "swarm.training.corrections:Opsm", "0 for bad answers far from the policy"),
        BuiltIn("tis+opsm", "swarm.training.corrections:TruncatedOpsm", "both", frozenset({WEIGHS})),
        BuiltIn(
            "shaped+opsm", "swarm.training.corrections:ShapedOpsm", "good answers by w / (w + γ), bad ones as tis+opsm",
            frozenset({WEIGHS}),
        ),
        BuiltIn("sequence_mask+opsm", "swarm.training.corrections:SequenceMaskOpsm", "both"),
    ),
)  # fmt: skip
ATTACKS = Registry(
    "an attack",
    (
        BuiltIn("poisoned style", "swarm.experiments.attacks.attacks:POISONED_STYLE", "right answers wrapped in junk"),
        BuiltIn(
            "only wrong answers", "swarm.experiments.attacks.attacks:ONLY_WRONG", "partly right answers as the best"
        ),
        BuiltIn("wrong rewards", "swarm.experiments.attacks.attacks:WRONG_REWARDS", "rewards turned round"),
        BuiltIn("copied rollouts", "swarm.experiments.attacks.attacks:COPIED", "groups of others as its own"),
        BuiltIn("spam", "swarm.experiments.attacks.attacks:SPAM", "valid headers, random bodies"),
        BuiltIn("stale flood", "swarm.experiments.attacks.attacks:STALE", "old groups in another order"),
        BuiltIn("no information", "swarm.experiments.attacks.attacks:NO_INFORMATION", "groups of equal rewards"),
        BuiltIn("forged author", "swarm.experiments.attacks.attacks:FORGED", "records in another node's name"),
        BuiltIn(
            "forged episodes", "swarm.experiments.attacks.attacks:FORGED_EPISODES", "replies that no environment gave"
        ),
        BuiltIn("replay", "swarm.experiments.attacks.attacks:REPLAYED", "records of others, sent again"),
        BuiltIn("equivocation", "swarm.experiments.attacks.attacks:EQUIVOCAL", "two bodies for one header"),
        BuiltIn("withheld bodies", "swarm.experiments.attacks.attacks:WITHHELD", "headers without bodies"),
        BuiltIn("sybils", "swarm.experiments.attacks.attacks:SYBILS", "fresh names in every round"),
    ),
)
