"""Writes the SHA-256 of every file that may be installed beside each pin of the lock files: `python packaging/lock_hashes.py`.

Run it after a pin was changed or added, with the environment of `make setup` (it needs httpx and packaging). It asks the
simple index of PyPI for the files of each pinned version and keeps those for the platforms that swarm runs on. `pip` then
refuses a file with any other content, whichever index or mirror it came from.
"""

import re
import sys
from pathlib import Path

import httpx
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKS = (
    "requirements-build.lock",
    "requirements.lock",
    "requirements-dev.lock",
    "requirements-vllm.lock",
    "requirements-vllm-cpu.lock",
    "requirements-vllm-cuda.lock",
)
INDEX = "https://pypi.org/simple"
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\]+)")
INTERPRETERS = {"py3", "cp311", "cp312", "cp313"}
PLATFORMS = re.compile(r"any|(manylinux.*|linux)_(x86_64|aarch64)|macosx_.*_(x86_64|arm64|universal2)")


def may_be_installed(filename: str, version: Version) -> bool:
    """Whether `filename` is a file of `version` that pip may choose on a supported platform."""
    try:
        if filename.endswith(".whl"):
            _, found, _, tags = parse_wheel_filename(filename)
            return found == version and any(
                (tag.interpreter in INTERPRETERS or tag.abi == "abi3") and PLATFORMS.fullmatch(tag.platform)
                for tag in tags
            )
        return filename.endswith((".tar.gz", ".zip")) and parse_sdist_filename(filename)[1] == version
    except (InvalidWheelFilename, InvalidSdistFilename):  # formats of long ago
        return False


def locked(client: httpx.Client, name: str, version: str) -> str:
    """The lines of one pin. Raises SystemExit where the index has no file of it."""
    answer = client.get(f"{INDEX}/{name}/").raise_for_status().json()
    digests = sorted(
        file["hashes"]["sha256"] for file in answer["files"] if may_be_installed(file["filename"], Version(version))
    )
    if not digests:
        sys.exit(f"{name}=={version}: the index has no file of this version; correct the pin")
    return " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in digests)])


def main() -> None:
    headers = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with httpx.Client(headers=headers, timeout=60.0, follow_redirects=True) as client:
        for lock in (ROOT / name for name in LOCKS):
            lines = lock.read_text(encoding="utf-8").splitlines()
            comments = [line for line in lines if line.startswith("#")]
            pins = [match.groups() for line in lines if (match := PIN.match(line))]
            pins.sort(key=lambda pin: pin[0].lower())
            lock.write_text("\n".join([*comments, *(locked(client, *pin) for pin in pins)]) + "\n", encoding="utf-8")
            print(f"{lock.name}: {len(pins)} pins")


if __name__ == "__main__":
    main()
