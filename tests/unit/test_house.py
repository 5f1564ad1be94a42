"""The source tree stays one that a newcomer can enter: bounds on what `make house` counts."""

import re

import pytest

from tests import house


def test_nothing_lies_loose_and_no_room_is_overfull() -> None:
    packages = house.files_of_packages()
    assert {name for name in house.modules() if name.count(".") == 1} == {
        "swarm.types",
        "swarm.errors",
        "swarm.__main__",
    }
    assert {name: count for name, count in packages.items() if count > 15} == {}
    assert len({name.split(".")[1] for name in packages if "." in name}) <= 34


def test_modules_are_few_and_none_is_long() -> None:
    assert len(house.modules()) <= 405
    assert {name: count for name, count in house.lines().items() if count > 450} == {}


def test_a_round_can_be_followed_in_few_files_which_are_all_reached_from_its_loop() -> None:
    assert len(set(house.ROUND_ALONE)) == len(house.ROUND_ALONE) <= 22
    assert len(set(house.ROUND_IN_A_SWARM)) == len(house.ROUND_IN_A_SWARM) <= 35
    names = {f"swarm.{name.replace('/', '.')}" for name in house.ROUND_IN_A_SWARM}
    assert names <= house.modules().keys(), "a file that was moved"
    alone = {f"swarm.{name.replace('/', '.')}" for name in house.ROUND_ALONE}
    assert alone <= house.reached_by_imports("swarm.node.training_loop")
    assert names <= house.reached_by_imports("swarm.node.node")


def test_the_architecture_lists_the_files_of_a_round() -> None:
    text = (house.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    alone, in_a_swarm = re.findall(
        r"^- (?:without a network|with it, also) \((\d+)\): (.*?)(?=\n\n|\n- )", text, re.M | re.S
    )
    listed = [tuple(re.findall(r"`([^`]+)`", files)) for _, files in (alone, in_a_swarm)]
    assert set(listed[0]) == set(house.ROUND_ALONE)
    assert set(listed[0] + listed[1]) == set(house.ROUND_IN_A_SWARM)
    assert [int(alone[0]), int(in_a_swarm[0])] == [len(files) for files in listed]


@pytest.mark.parametrize(("place", "steps"), house.STEPS.items(), ids=lambda value: str(value[-1]))
def test_the_steps_of_a_round_are_calls_in_the_order_of_the_data_path(
    place: tuple[str, str], steps: tuple[str, ...]
) -> None:
    calls = iter(house.calls_of(*place))
    assert all(step in calls for step in steps), "a step is missing, or stands before an earlier one"


def test_constructors_have_at_most_seven_parameters() -> None:
    assert {name: count for name, count in house.constructors().items() if count > 7} == {}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert house.circles() == []
