"""Counts of the source tree: what a newcomer has to hold in mind. `make house` prints them, a test bounds them."""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "swarm"


@functools.cache
def modules() -> dict[str, ast.Module]:
    """{dotted name: syntax tree} of every module besides the `__init__` files."""
    paths = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(node: ast.AST) -> Iterator[str]:
    """Modules of this package that one statement imports."""
    if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in modules() else node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, but those for type checkers alone."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With):
            yield from at_import(node.body)


@functools.cache
def graph() -> dict[str, frozenset[str]]:
    """{module: modules that are imported with it}."""
    return {
        name: frozenset(one for node in at_import(tree.body) for one in imported(node) if one in modules()) - {name}
        for name, tree in modules().items()
    }


def circles() -> list[tuple[str, str]]:
    """Pairs of modules each of which is imported, directly or not, by the other."""

    @functools.cache
    def reached(start: str) -> frozenset[str]:
        found, waiting = set[str](), [start]
        while waiting:
            new = graph()[waiting.pop()] - found
            found |= new
            waiting += new
        return frozenset(found)

    return [(one, other) for one in graph() for other in reached(one) if one < other and one in reached(other)]


def with_one_importer() -> list[str]:
    """Modules that only one other module of the same package imports, at any place."""
    importers: dict[str, set[str]] = {}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            for one in imported(node):
                importers.setdefault(one, set()).add(name)
    return [
        name
        for name in modules()
        if len(by := importers.get(name, set()) - {name}) == 1 and next(iter(by)).rpartition(".")[0] == name.rpartition(".")[0]
    ]  # fmt: skip


def constructors() -> Counter[str]:
    """{class: parameters of its constructor}."""
    return Counter(
        {
            f"{name}.{node.name}": len(item.args.args) + len(item.args.kwonlyargs) - 1
            for name, tree in modules().items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for item in node.body
            if isinstance(item, ast.FunctionDef) and item.name == "__init__"
        }
    )


def lines() -> Counter[str]:
    """{module: lines}."""
    return Counter({name: (ROOT / (name.replace(".", "/") + ".py")).read_text().count("\n") for name in modules()})


def files_of_packages() -> Counter[str]:
    """{package: modules in it, without those of its sub-packages}."""
    return Counter(name.rpartition(".")[0] for name in modules())


ROUND_ALONE = (
    # the loop, the round and its parts
    "node/training_loop", "node/learner", "node/batch_builder", "node/round_metrics", "types",
    # task → rollouts
    "tasks/task_cursor", "tasks/task_mixture", "tasks/task_source",
    "rollouts/rollout_round", "rollouts/worker", "engine/slot_engine", "engine/slot_run",
    # batch → step → checkpoint
    "training/experience", "training/trainer", "training/advantages", "training/micro_batch", "policy/logprobs",
    "training/policy_loss", "training/losses", "training/policy_optimizer", "engine/canary", "adapters/checkpoint",
)  # fmt: skip
"""Files that one opens to follow a round of a node without a network, from its tasks to its checkpoint."""
ROUND_IN_A_SWARM = (
    *ROUND_ALONE,
    # rollouts → records → index and gossip
    "node/node", "sharing/exchange", "sharing/publisher", "records/codec", "network/transport",
    # → admission → pool
    "sharing/reader", "sharing/inbox", "sharing/header_validator", "admission/admission", "admission/reward_verifier",
    "pool/experience_pool",
    # merge
    "merging/policy_merging", "merging/merger",
)  # fmt: skip
"""The same of a node that shares its rollouts and merges with others."""
STEPS = {
    ("node/learner", "Learner.run_round"): (
        "_sample", "_publish", "own_groups", "draw_from_pool", "compose", "step", "_merge", "check", "_metrics",
    ),
    ("node/learner", "Learner._sample"): ("_follow_beacon", "run"),
    ("node/training_loop", "TrainingRun._round"): ("run_round", "record", "_save", "_evaluate"),
}  # fmt: skip
"""Calls of a function in the order of the data path; there may be others between them."""


def calls_of(module: str, function: str) -> list[str]:
    """Names of the functions that a method calls, in the order in which they stand."""
    owner, _, method = function.partition(".")
    for node in ast.walk(modules()[f"swarm.{module.replace('/', '.')}"]):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            body = next(one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == method)
            calls = [one.func for one in ast.walk(body) if isinstance(one, ast.Call)]
            named = [one for one in calls if isinstance(one, ast.Attribute)]
            return [one.attr for one in sorted(named, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0))]
    raise LookupError(f"{function} in {module}")


def reached_by_imports(start: str) -> set[str]:
    """Modules that are imported with `start`, directly or not, at any place."""
    found, waiting = {start}, [start]
    while waiting:
        tree = modules()[waiting.pop()]
        new = {one for node in ast.walk(tree) for one in imported(node) if one in modules()} - found
        found |= new
        waiting += new
    return found


def main() -> None:
    packages, sizes = files_of_packages(), lines()
    (longest, num_lines), (widest, num_parameters) = sizes.most_common(1)[0], constructors().most_common(1)[0]
    rooms = {name.split(".")[1] for name in packages if "." in name}
    large = sum(count > 7 for count in constructors().values())
    print(f"modules {len(sizes)} in {len(rooms)} rooms, {packages['swarm']} loose, {sum(sizes.values())} lines")
    print(f"fullest package {packages.most_common(1)[0]}, longest module {longest} with {num_lines} lines")
    print(f"largest constructor {widest} with {num_parameters} parameters; {large} with more than 7")
    print(f"files to follow a round: {len(ROUND_ALONE)} without a network, {len(ROUND_IN_A_SWARM)} with it")
    print(f"import circles {len(circles())}, modules with one importer in their own package {len(with_one_importer())}")


if __name__ == "__main__":
    main()
