"""What pip-audit found, told in a line: `python -m tests.audit RESULT.json`. Exit code 1 for a known vulnerability.

An index that does not answer, or knows none of the packages, is told as that: nothing was checked then, and nothing is failed.
"""

import json
import sys
from pathlib import Path

NOTHING_CHECKED = (
    "audit: NOTHING WAS CHECKED: no index of vulnerabilities answered.\n"
    "audit: run `make audit` on a machine that reaches pypi.org before you release or install for others."
)


def told(result: Path) -> tuple[int, str]:
    """(exit code, message) of a result in pip-audit's JSON format; the file is absent or empty where it could not begin."""
    try:
        packages = json.loads(result.read_text(encoding="utf-8"))["dependencies"]
    except (OSError, ValueError, KeyError):
        packages = []
    checked = [package for package in packages if "skip_reason" not in package]
    found = [(package, flaw) for package in checked for flaw in package["vulns"]]
    if not checked:
        return 0, NOTHING_CHECKED
    lines = [
        f"{package['name']} {package['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'no release'}"
        for package, flaw in found
    ]
    lines.append(f"audit: {len(checked)} of {len(packages)} packages checked, {len(found)} known vulnerabilities")
    return int(bool(found)), "\n".join(lines)


if __name__ == "__main__":
    code, message = told(Path(sys.argv[1]))
    print(message)
    sys.exit(code)
