"""The source tree stays one that a newcomer can enter: bounds on what `make house` counts."""

from tests import house


def test_nothing_lies_loose_and_no_room_is_overfull() -> None:
    packages = house.files_of_packages()
    assert {name for name in house.modules() if name.count(".") == 1} == {"swarm.types", "swarm.errors"}
    assert {name: count for name, count in packages.items() if count > 15} == {}
    assert len({name.split(".")[1] for name in packages if "." in name}) <= 34


def test_modules_are_few_and_none_is_long() -> None:
    assert len(house.modules()) <= 350
    assert {name: count for name, count in house.lines().items() if count > 450} == {}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert house.circles() == []
