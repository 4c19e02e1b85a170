"""Make the virtual environment that the Makefile runs things in, or bring it up to date.

    python3 tools/environment.py .venv test --if-reachable parity --pin torch==2.13.0

installs the dependencies and the named extras of pyproject.toml, narrowed by the pins, and puts the
repository on the path. Where the Python that runs this has a suitable torch already (a GPU machine, say),
the environment sees that Python's packages too: the pins of torch, Triton and NumPy give way to what is
there, only what is missing is installed, and what no package index offers is named and done without.
Standard library and pip only.
"""

import argparse
import hashlib
import importlib.util
import os
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:
    sys.exit(f"fbtriton needs Python 3.11 or later; {sys.executable} is older, so say make PYTHON=...")
try:
    from packaging.requirements import Requirement
except ModuleNotFoundError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
PIP_INSTALL = ["-m", "pip", "install", "-qq", "--no-input", "--no-warn-conflicts"]
PROBE = ["--dry-run", "--no-deps", "--retries", "0", "--timeout", "5"]
PROBE_SECONDS = 30  # looking up a host name heeds no timeout of pip's


def main() -> None:
    args = parse_arguments()
    leave(args.venv)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dependencies = parse(project["project"]["dependencies"])
    if args.triton_fork:  # it installs the package triton, as Triton does: only one of the two can be there
        dependencies = [d for d in dependencies if d.name != "triton"]
    torch = None if args.own else version("torch", sys.path)
    inherit = any(d.name == "torch" and accepts(d, torch) for d in dependencies)

    stamp = args.venv / f"ready-{'-'.join(args.extras)}"
    inputs = [(ROOT / "pyproject.toml").read_text(), Path(__file__).read_text(), sys.argv, sys.version, torch]
    key = hashlib.sha256(repr(inputs).encode()).hexdigest()
    if stamp.exists() and stamp.read_text().startswith(key):
        print(stamp.read_text().removeprefix(key), end="", flush=True)  # the note below, if there was one
        return

    pins = {pin.name: pin for pin in parse(args.pin)}
    optional, left_out = args.if_reachable, []
    if inherit:
        print(f"{args.venv}: uses torch {torch} and the other packages of {sys.executable}", flush=True)
        if importlib.util.find_spec("fbgemm_gpu"):
            optional = []  # FBGEMM's CPU build would hide the one that is there
        elif not accepts(pins["torch"], torch):
            optional, left_out = [], [f"{extra} (needs {pins['torch']})" for extra in optional]
        pins = {name: pin for name, pin in pins.items() if name not in {d.name for d in dependencies}}

    extras, no_deps = project["project"]["optional-dependencies"], project["tool"]["fbtriton"]["no-deps"]
    wanted = dependencies + [r for extra in args.extras for r in parse(extras[extra])]
    maybe = [r for extra in optional for r in parse(extras[extra])]
    alone = [r for extra in args.extras for r in parse(no_deps.get(extra, []))] + parse(args.triton_fork)
    for requirement in wanted + maybe + alone:
        if requirement.name in pins:
            requirement.specifier &= pins[requirement.name].specifier

    path = create(args.venv, inherit)
    if lacking(wanted + maybe + alone, path):
        for other in args.venv.glob("ready-*"):
            other.unlink()  # what it vouches for may change now
        may_lack = wanted + maybe + alone if inherit else maybe
        unreachable = probe(args.venv, lacking(may_lack, path))
        together, alone_now = lacking(wanted + maybe, path) - unreachable, lacking(alone, path) - unreachable
        install(args, together, alone_now, may_fail=inherit)
        left_out += sorted(lacking(wanted + maybe + alone, path))
    note = ""
    if left_out:
        note = f"{args.venv}: not installed: {', '.join(left_out)}. To try again, rm {stamp}\n"
    stamp.write_text(key + note)
    print(note, end="", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a virtual environment, or bring it up to date.")
    parser.add_argument("venv", type=Path)
    parser.add_argument("extras", nargs="+", help="extras of pyproject.toml")
    parser.add_argument("--if-reachable", nargs="*", default=[], help="extras to do without if need be")
    parser.add_argument("--pin", action="append", default=[], help="narrows a requirement: torch==2.13.0")
    parser.add_argument("--own", action="store_true", help="see no packages of the Python that runs this")
    parser.add_argument(
        "--triton-fork", action="append", default=[], help="replaces Triton, which is removed if torch brought it along"
    )
    parser.add_argument("--torch-index", help="package index to take torch from")
    return parser.parse_args()


def leave(environment: Path) -> None:
    """Where the environment is itself the active one, start again in the Python that it was made with."""
    if environment.exists() and environment.samefile(sys.prefix):
        made_with = environment / "made-with"
        base = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        python = made_with.read_text() if made_with.exists() else base
        os.execv(python, [python, *sys.argv])


def create(environment: Path, inherit: bool) -> list[str]:
    """Make the environment if need be; returns the folders where its packages are."""
    if environment.exists() and not (environment / "pyvenv.cfg").exists():
        sys.exit(f"{environment} exists and is not a virtual environment; say make VENV=...")
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(environment)}))
    if not (packages.exists() and (environment / "bin/python").exists()):
        try:
            venv.create(environment, clear=True, symlinks=True, with_pip=True)
        except subprocess.CalledProcessError:
            venv.create(environment, clear=True, symlinks=True)  # no ensurepip: nothing can be installed
        (environment / "made-with").write_text(sys.executable)
    # As lines of a .pth file: --system-site-packages alone would miss the packages of a Python that is in a
    # virtual environment itself.
    seen = site.getsitepackages() if inherit else []
    if inherit and site.ENABLE_USER_SITE:
        seen.append(site.getusersitepackages())
    lines = [str(ROOT), *(f"import site; site.addsitedir({folder!r})" for folder in seen)]
    (packages / "fbtriton-environment.pth").write_text("\n".join(lines) + "\n")
    return [str(packages), *(sys.path if inherit else [])]


def parse(texts: Iterable[str]) -> list[Requirement]:
    """The requirements that apply to this machine, without their markers."""
    requirements = [r for r in map(Requirement, texts) if r.marker is None or r.marker.evaluate()]
    for requirement in requirements:
        requirement.marker = None
    return requirements


def version(name: str, path: list[str]) -> str | None:
    return next((found.version for found in Distribution.discover(name=name, path=path)), None)


def accepts(requirement: Requirement, found: str | None) -> bool:
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def lacking(requirements: list[Requirement], path: list[str]) -> set[str]:
    return {str(r) for r in requirements if not accepts(r, version(r.name, path))}


def pip_install(environment: Path, *arguments: str) -> list[str]:
    return [str(environment / "bin/python"), *PIP_INSTALL, *arguments]


def probe(environment: Path, requirements: set[str]) -> set[str]:
    """Those of the requirements that no package index offers."""

    def fails(requirement: str) -> bool:
        command = pip_install(environment, *PROBE, requirement)
        try:
            return subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS).returncode != 0
        except subprocess.TimeoutExpired:
            return True

    with ThreadPoolExecutor(8) as pool:
        return {r for r, failed in zip(requirements, pool.map(fails, requirements)) if failed}


def install(args: argparse.Namespace, together: set[str], alone: set[str], may_fail: bool) -> None:
    steps = []
    if args.torch_index:
        torch = [r for r in together if Requirement(r).name == "torch"]
        steps += [["--index-url", args.torch_index, *torch]] if torch else []
    steps += [sorted(together)] if together else []
    if args.triton_fork:
        subprocess.run([args.venv / "bin/python", "-m", "pip", "uninstall", "-qq", "-y", "triton"])
    steps += [["--no-deps", *sorted(alone)]] if alone else []
    if steps:
        print(f"{args.venv}: installing {', '.join(sorted(together | alone))}", flush=True)
    for step in steps:
        failed = subprocess.run(pip_install(args.venv, *step)).returncode
        if failed and not may_fail:
            sys.exit(f"{args.venv}: pip could not install {' '.join(step)}")


if __name__ == "__main__":
    main()
