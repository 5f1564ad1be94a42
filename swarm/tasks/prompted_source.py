r"""How a source asks its tasks and where it finds the answer: `prompt_template`, prompt context, and the rule for final answers.

    fields of a task ─▶ PromptTemplate ─▶ the user's text ─▶ chat template with the context (in `swarm/policy`)
    an answer's text ─▶ final answer ─▶ the source's own verifier

In a template, `{name}` stands for a field of the task and `{{name}}` for the text `{name}`. All other braces are text, as in
`\boxed{}`. The value of a field is inserted as it is and never read as a template. The right answer is no field.

Text is only concatenated and searched, in time proportional to its length.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from swarm.config import TaskSourceFacts
from swarm.errors import TaskError
from swarm.extensions.points import TASK_SOURCES, TOOLS
from swarm.tasks.environments.tool import described
from swarm.tasks.final_answers import FinalAnswerRule, answer_rule, final_answer, written_by
from swarm.tasks.task_source import CORRECT, MAX_TEXT_CHARS, TaskFailure, TaskSource
from swarm.types import PLAIN, Episode, PromptContext, Step, Task

PROMPT = "prompt"
"""The field that every task has: the text that it asks without a template."""
_FIELD = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]{0,63})\}\}|\{([A-Za-z_][A-Za-z0-9_]{0,63})\}")
_RULES = "prompted-1"


def _parts(template: str) -> Iterator[tuple[str, str]]:
    """(text, "") and ("", name of a field) in order."""
    position = 0
    for found in _FIELD.finditer(template):
        yield template[position : found.start()], ""
        yield (f"{{{found[1]}}}", "") if found[1] else ("", found[2])
        position = found.end()
    yield template[position:], ""


class PromptTemplate:
    """The text of the user's message with the fields of a task in it. It is immutable and safe from any thread."""

    def __init__(self, config: TaskSourceFacts, fields: Collection[str] | None) -> None:
        """`fields`: what every task of the source has; None where that differs from task to task, as in a file.

        Raises TaskError for a template that names no field, or one that a task lacks.
        """
        self._source = config.source_name
        self._parts = list(_parts(config.prompt_template or f"{{{PROMPT}}}"))
        self.names = frozenset(name for _, name in self._parts if name)
        if not self.names:
            raise self._error(f"name a field, such as {{{PROMPT}}}, got none", "add one, or every task asks the same")
        if hidden := sorted(self.names & {"answer", "verifier"}):
            raise self._error(
                f"name fields that a policy may see, got {{{hidden[0]}}}",
                f"write {{{{{hidden[0]}}}}} for that text itself",
            )
        if fields is not None and (unknown := sorted(self.names - set(fields))):
            raise self._error(
                f"name fields of the task ({', '.join(sorted(fields))}), got {{{unknown[0]}}}",
                f"correct it, or write {{{{{unknown[0]}}}}} for that text itself",
            )

    def render(self, fields: Mapping[str, str]) -> str:
        """The user's text. Raises TaskFailure where it is too long. `fields` has all of `names`."""
        pieces = [fields[name] if name else text for text, name in self._parts]
        num_chars = sum(map(len, pieces))  # before they are joined: a template may repeat a long field
        if num_chars > MAX_TEXT_CHARS:
            raise TaskFailure(
                self._source,
                f"a prompt must have at most {MAX_TEXT_CHARS} characters, got {num_chars} with its template",
            )
        return "".join(pieces)

    def _error(self, rule: str, fix: str) -> TaskError:
        return TaskError(f"prompt_template must {rule}; {fix}; set tasks.sources.prompt_template of {self._source!r}")


def prompt_context(config: TaskSourceFacts) -> PromptContext:
    """The context in which a source asks."""
    arguments = json.dumps(config.template_arguments, sort_keys=True) if config.template_arguments else ""
    told = [TOOLS.load(one.name) for one in config.tools if not one.marks]
    tools = described(told) if told else ""
    return PromptContext(config.system, tuple((one.prompt, one.answer) for one in config.examples), arguments, tools)


def shared_context(sources: Sequence[TaskSourceFacts]) -> PromptContext:
    """The context of prompts that belong to no task: that of all sources if they have the same, else none."""
    first, *others = {prompt_context(source) for source in sources}
    return PLAIN if others else first


def verifier_signals(kind: str) -> tuple[str, ...]:
    """The signals that the verifier of a kind of source gives: `signal_names` of a built-in class, else `correct` alone."""
    if not TASK_SOURCES.is_built_in(kind):
        return (CORRECT,)
    names: tuple[str, ...] = getattr(TASK_SOURCES.load(kind), "signal_names", (CORRECT,))
    return names


class PromptedSource:
    """Wraps a source that has a prompt context, a prompt template or a rule for final answers.

    The inner source applies the template itself, as it alone knows the fields of its tasks.
    """

    def __init__(self, source: TaskSource, config: TaskSourceFacts) -> None:
        """Raises TaskError for a rule with parameters that it does not accept."""
        self.name = source.name
        self._source = source
        self._rule = answer_rule(config)
        self._no_answer = dict.fromkeys(verifier_signals(config.kind), 0.0)
        self._context = prompt_context(config)
        facts = [_RULES, source.config_digest, config.form, self._rule.rules]
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        self.config_digest = hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def num_held_out(self) -> int:
        return self._source.num_held_out

    @property
    def max_turns(self) -> int:
        return getattr(self._source, "max_turns", 1)

    def task(self, seed: int, index: int) -> Task:
        task = self._source.task(seed, index)
        ref = replace(task.ref, config_digest=self.config_digest)
        begin = None if task.begin is None else partial(_AnsweredEpisode, task.begin, self._rule)
        verify = partial(self._verify, task.verify)
        return replace(task, ref=ref, verify=verify, context=self._around(task.context), begin=begin)

    def _around(self, of_task: PromptContext) -> PromptContext:
        """The context of the settings, with what the conversations of a data set all begin with."""
        own = self._context
        return replace(own, system=own.system or of_task.system, examples=own.examples + of_task.examples)

    def answer(self, seed: int, index: int) -> str:
        return self._source.answer(seed, index)

    def demonstrate(self, seed: int, index: int) -> Sequence[str]:
        """Right answers in the form that the rule finds."""
        demonstrate = getattr(self._source, "demonstrate", None)
        answers = [self.answer(seed, index)] if demonstrate is None else demonstrate(seed, index)
        return [written_by(self._rule, answer) for answer in answers]

    def _verify(self, verify: Callable[[str], float | Mapping[str, float]], text: str) -> float | Mapping[str, float]:
        answer = final_answer(self._rule, text)
        return dict(self._no_answer) if answer is None else verify(answer)


class _AnsweredEpisode:
    """An episode whose environment gets the final answer of each text; an empty one where a text has none."""

    def __init__(self, begin: Callable[[], Episode], rule: FinalAnswerRule) -> None:
        self._episode = begin()
        self._rule = rule

    def step(self, answer: str) -> Step:
        return self._episode.step(final_answer(self._rule, answer) or "")
