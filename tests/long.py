"""Which tests `make test` leaves out: functions of tests that take long in all, unless they are marked `essential`.

make check PYTEST_ADDOPTS=--junitxml=times.xml
python -m tests.long times.xml       # writes `long.txt` anew; tests that are not in the report keep their lines
"""

import ast
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests import house

LIST = Path(__file__).with_name("long.txt")
LIMIT_S = 3
"""Over all parameters of a function, beside other tests on two cores."""


def listed() -> dict[str, int]:
    """Names of functions, with dots, and their seconds."""
    lines = map(str.split, LIST.read_text(encoding="utf-8").splitlines())
    return {name: int(seconds) for seconds, name in lines}


def name_of(node_id: str) -> str:
    """The function of a test as pytest names it: dots for slashes and colons, and no parameters."""
    return re.sub(r"\.py::|::|/", ".", node_id.partition("[")[0])


def existing() -> set[str]:
    return {name for file in (house.ROOT / "tests").glob("*/test_*.py") for name in _functions(file)}


def _functions(file: Path) -> Iterator[str]:
    module = ".".join(file.relative_to(house.ROOT).with_suffix("").parts)
    for one in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{module}.{one.name}"
        elif isinstance(one, ast.ClassDef):
            yield from (f"{module}.{one.name}.{part.name}" for part in one.body if isinstance(part, ast.FunctionDef))


def measured(report: Path) -> Counter[str]:
    """Seconds of each function in a JUnit report."""
    seconds = Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[f"{case.attrib['classname']}.{name_of(case.attrib['name'])}"] += float(case.attrib["time"])
    return seconds


def main() -> None:
    seconds = measured(Path(sys.argv[1]))
    kept = {name: took for name, took in listed().items() if name not in seconds and name in existing()}
    long = kept | {name: round(took) for name, took in seconds.items() if took > LIMIT_S}
    LIST.write_text("".join(f"{took} {name}\n" for name, took in sorted(long.items())), encoding="utf-8")


if __name__ == "__main__":
    main()
