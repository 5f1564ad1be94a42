"""Reports what hostile nodes cost the honest ones, as tables, curves and sentences.

Final reward is the mean over the honest nodes and the last third of the rounds. It is compared, seed by seed, with that of the
same nodes in the defended swarm without an attack.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from swarm.experiments.attacks.plan import ABSENT, ALL, ATTACKS, DEFENCES, DEFENDED, EPISODES, OPEN
from swarm.experiments.cells import Result
from swarm.machine.safe_files import SHARED, replace_file
from swarm.report.tables import Curves, Spread, Table, plot, smooth, write_report

_WINDOW_ROUNDS = 5


def in_turn_table(results: Sequence[Result]) -> Table:
    """All attacks in turn: by number of hostile nodes, mean ± standard deviation over seeds."""
    rows = []
    for number in sorted({result["num_hostile"] for result in results if result["attack"] in ("none", ALL)}):
        row = [str(number)]
        for defence in DEFENCES:
            chosen = _select(results, ALL if number else "none", number, defence)
            row += [_text(_final(chosen), 3), _text(_relative(results, chosen)), _text(_held_out(results, chosen))]
        rows.append(row)
    headers = ["hostile nodes"]
    for defence in DEFENCES:
        headers += [f"{defence}: final reward", "× attack-free", "held-out ×"]
    return Table("All attacks in turn", headers, rows)


def attack_table(results: Sequence[Result]) -> Table:
    """Each attack alone, by the most hostile nodes there are; first what their absence costs."""
    rows = []
    for attack in (ABSENT, *ATTACKS):
        by_defence = {defence: [r for r in results if _is_attacked(r, attack, defence)] for defence in DEFENCES}
        guarded, unguarded = by_defence[DEFENDED], by_defence[OPEN]
        if not guarded and not unguarded:
            continue
        rows.append(
            [
                attack, _text(_relative(results, guarded)), _text(_held_out(results, guarded)), _reasons(guarded),
                _hostile_part(guarded), _text(_relative(results, unguarded)), _text(_held_out(results, unguarded)),
                _hostile_part(unguarded),
            ]
        )  # fmt: skip
    headers = [
        "attack", "defended × attack-free", "held-out ×", "turned away as", "hostile part of bodies",
        "undefended × attack-free", "held-out ×", "hostile part of bodies",
    ]  # fmt: skip
    return Table("Each attack alone", headers, rows)


def memory_table(results: Sequence[Result]) -> Table:
    """How the process with all nodes grew over the second half of its rounds, when everything is loaded."""
    rows = []
    for defence in DEFENCES:
        for attack in ("none", ABSENT, ALL, *ATTACKS):
            grown = [_growth_mib(r) for r in results if r["attack"] == attack and r["defence"] == defence]
            if grown:
                rows.append([f"{attack}, {defence}", f"{fmean(grown):+.0f}"])
    return Table("Memory of all nodes together, second half of the rounds", ["run", "MiB"], rows)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Ratios to the attack-free run, for programs."""
    found: dict[str, Any] = {"in_turn": {}, "alone": {}}
    for number in sorted({result["num_hostile"] for result in results if result["attack"] == ALL}):
        for defence in DEFENCES:
            ratio = _relative(results, _select(results, ALL, number, defence))
            found["in_turn"][f"{number} {defence}"] = ratio.rounded()
    for attack in (ABSENT, *ATTACKS):
        for defence in DEFENCES:
            chosen = [r for r in results if _is_attacked(r, attack, defence)]
            if chosen:
                found["alone"][f"{attack} {defence}"] = _relative(results, chosen).rounded()
    found["banned_honest"] = sum(result["banned_honest"] for result in results)
    found["copied_without_attack"] = sum(
        result["rejected"].get("copied", 0) for result in results if result["attack"] == "none"
    )
    found["memory_growth_mib"] = round(max((_growth_mib(result) for result in results), default=0.0), 1)
    return found


def curves(results: Sequence[Result]) -> list[Curves]:
    """Mean reward of honest nodes by round, where all attacks come in turn from the most nodes."""
    number = max((result["num_hostile"] for result in results if result["attack"] == ALL), default=0)
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for label, attack, hostile, defence in (
        ("no attack", "none", 0, DEFENDED),
        (f"{number} hostile, defended", ALL, number, DEFENDED),
        (f"{number} hostile, undefended", ALL, number, OPEN),
    ):
        runs = [[fmean(row) for row in result["rewards"]] for result in _select(results, attack, hostile, defence)]
        if runs:
            mean = [fmean(column) for column in zip(*runs, strict=True)]
            lines[label] = (list(range(1, len(mean) + 1)), smooth(mean, _WINDOW_ROUNDS))
    return [Curves("honest nodes", "round", f"mean reward, {_WINDOW_ROUNDS} rounds", lines)]


def write_all(folder: Path, results: Sequence[Result]) -> tuple[Path, list[Table]]:
    """report.html, curves.png and table.md in `folder`. Returns the report and its tables."""
    tables = [in_turn_table(results), attack_table(results), memory_table(results)]
    picture = plot(curves(results))
    replace_file(folder / "curves.png", picture, SHARED)
    text = "\n\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables)
    replace_file(folder / "table.md", text + "\n", SHARED)
    report = folder / "report.html"
    write_report(report, "What hostile peers cost", explanation(), tables, picture)
    return report, tables


def explanation() -> list[str]:
    """Paragraphs above the tables."""
    return [
        "Honest nodes have the default settings, hostile ones sample by the base and send what the attack says. Defended: "
        "admission, reputation, probation, bans. Undefended: every record that can be decoded is believed and drawn alike.",
        "Final reward: mean over the honest nodes and the last third of the rounds, relative to the same nodes of the same "
        "seed in the defended swarm without attack, which has all nodes honest. Mean ± standard deviation over seeds. Absent: "
        "the hostile nodes send nothing, so honest ones have fewer to learn from; only a cost beyond that is the attack's own.",
    ]


def _is_attacked(result: Result, attack: str, defence: str) -> bool:
    return (result["attack"], result["defence"]) == (attack, defence) and result["num_hostile"] > 0


def _select(results: Sequence[Result], attack: str, number: int, defence: str) -> list[Result]:
    wanted = (attack, number, defence)
    return [r for r in results if (r["attack"], r["num_hostile"], r["defence"]) == wanted]


def _final(results: Sequence[Result], num_nodes: int | None = None) -> Spread:
    return Spread.of(final_reward(result, num_nodes) for result in results)


def final_reward(result: Result, num_nodes: int | None = None) -> float:
    """Mean reward of the first `num_nodes`, or of all, over the last third of the rounds."""
    rows = result["rewards"][-max(1, len(result["rewards"]) // 3) :]
    return fmean(fmean(row[:num_nodes]) for row in rows)


def _relative(results: Sequence[Result], chosen: Sequence[Result]) -> Spread:
    """Ratio of final rewards to those of the same nodes without attack, by seed."""
    return Spread.of(
        final_reward(result) / final_reward(quiet, len(result["rewards"][0]))
        for result, quiet in _beside_quiet(results, chosen)
    )


def _held_out(results: Sequence[Result], chosen: Sequence[Result]) -> Spread:
    return Spread.of(
        fmean(result["held_out"]) / fmean(quiet["held_out"][: len(result["held_out"])])
        for result, quiet in _beside_quiet(results, chosen)
    )


def _beside_quiet(results: Sequence[Result], chosen: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    """Each result with the run of its seed and its tasks without an attack, where there is one."""
    for result in chosen:
        attack = EPISODES if result["attack"] == EPISODES else "none"
        found = [r for r in _select(results, attack, 0, DEFENDED) if r["seed"] == result["seed"]]
        if found:
            yield result, found[0]


def _text(spread: Spread, digits: int = 2) -> str:
    """An empty text where nothing was measured."""
    return spread.text(digits) if spread.values else ""


def _reasons(results: Sequence[Result]) -> str:
    """The three most frequent reasons of rejection."""
    totals: dict[str, int] = {}
    for result in results:
        for reason, count in result["rejected"].items():
            totals[reason] = totals.get(reason, 0) + count
    return ", ".join(
        f"{reason} {totals[reason]}" for reason in sorted(totals, key=totals.__getitem__, reverse=True)[:3]
    )


def _hostile_part(results: Sequence[Result]) -> str:
    total = sum(result["hostile_bodies"] + result["honest_bodies"] for result in results)
    return f"{sum(result['hostile_bodies'] for result in results) / total:.0%}" if total else ""


def _growth_mib(result: Result) -> float:
    memory = result["memory_mib"]
    return memory[-1] - memory[len(memory) // 2]
