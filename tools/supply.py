"""The packages that this project is developed and tested with: locked with hashes, listed with licences, audited.

`python -m tools.supply lock` writes the lock files of .ci/ from pyproject.toml and constraints.txt,
`licences` writes docs/licences.md, `check` compares this environment with the lock, `audit` asks for known
vulnerabilities, and `cuda` installs the CUDA libraries of the lock if the torch that is installed asks for them.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / ".ci"
DEV, CUDA, TOOLS = LOCKS / "dev.lock", LOCKS / "cuda.lock", LOCKS / "tools.lock"
LICENCES = ROOT / "docs" / "licences.md"
PYTHON = "3.11"
"""The oldest for which the pinned versions are made."""
EXTRAS = ("gpu", "ot", "encoders", "data", "hub", "eval", "baselines", "train", "bench", "docs", "test")
OWN = "geoflow-fast"

ELSEWHERE = {
    ("torch", "2.13.0"): ("6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",),
}
"""SHA-256 of wheels that PyPI does not carry: torch's CPU build for Linux, Python 3.11."""

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "MIT",
    "MIT-CMU",
    "MPL-2.0",
    "PSF-2.0",
    "Zlib",
}
"""Licences that a package of the environment may have; MPL-2.0 asks only that changes of its own files are shared."""
WORDS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""What packages without an SPDX expression write; those that say "BSD" without a number have the three clauses."""
UNREACHABLE = 3
"""Status of `audit` when nothing could be asked."""


@dataclass(frozen=True)
class Locked:
    """A line of a lock file: a package in one version, where its marker holds, and the files it may come as."""

    name: str
    version: str
    marker: Marker | None
    hashes: tuple[str, ...]

    @property
    def applies(self) -> bool:
        """Whether it belongs into an environment like this one."""
        return self.marker is None or self.marker.evaluate()


def read_lock(path: Path) -> list[Locked]:
    """The lines of a lock file; ValueError naming one that is not a version with hashes."""
    entries = []
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        words, *hashes = re.split(r"\s+--hash=sha256:", line.strip())
        asked = Requirement(words)
        pin = re.fullmatch(r"==([^,*]+)", str(asked.specifier))
        if pin is None or not hashes or not all(re.fullmatch("[0-9a-f]{64}", value) for value in hashes):
            raise ValueError(f"{path}: {words} is not one version with the SHA-256 of its files")
        entries.append(Locked(canonicalize_name(asked.name), pin[1], asked.marker, tuple(hashes)))
    return entries


# ---- lock ----------------------------------------------------------------------------------------------------------


def compiled(*arguments: str, stdin: str | None = None) -> str:
    """What uv resolves for every platform, with the hashes of all files of each release."""
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--universal", "--python-version", PYTHON]
    command += ["--generate-hashes", "--no-header", "--no-annotate", *arguments]
    return subprocess.run(command, cwd=ROOT, input=stdin, check=True, stdout=subprocess.PIPE, text=True).stdout


def entries_of(text: str) -> list[str]:
    """A lock's text cut into packages."""
    return re.findall(r"^\S.*(?:\n[ \t]+.*)*", text, re.MULTILINE)


def with_other_files(entry: str) -> str:
    """The entry, with wheels added that PyPI does not carry."""
    words = Requirement(re.split(r"\s*\\\n", entry)[0])
    pinned = (canonicalize_name(words.name), str(words.specifier).removeprefix("=="))
    return entry + "".join(f" \\\n    --hash=sha256:{value}" for value in ELSEWHERE.get(pinned, ()))


def is_cuda(entry: str) -> bool:
    """Whether it is one of the CUDA libraries that PyPI's torch for Linux asks for."""
    return entry.startswith(("cuda-", "nvidia-"))


def lock() -> None:
    """Writes all lock files."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    entries = entries_of(compiled("--constraint", "constraints.txt", *extras, "pyproject.toml"))
    write_lock(DEV, "What `make setup` installs", [with_other_files(x) for x in entries if not is_cuda(x)])
    write_lock(CUDA, "What PyPI's torch for Linux needs besides", [x for x in entries if is_cuda(x)])
    tools = entries_of(compiled("--constraint", "constraints.txt", "-", stdin="uv\npip-audit\n"))
    write_lock(TOOLS, "What `make lock` and `make audit` run", tools)


def write_lock(path: Path, title: str, entries: Iterable[str]) -> None:
    """One file, with a line on how it is made."""
    path.write_text(f"# {title}: `make lock` writes it.\n" + "\n".join(entries) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(read_lock(path))} packages")


# ---- licences ------------------------------------------------------------------------------------------------------


def licence_of(about: Mapping[str, str], classifiers: Iterable[str]) -> str:
    """The licence that a package states, as an SPDX expression where it can be told."""
    stated = [about.get("License-Expression"), about.get("License")]
    stated += [words.split(" :: ")[-1] for words in classifiers if words.startswith("License :: OSI Approved :: ")]
    known = [WORDS.get(words, words) for words in stated if words and "\n" not in words and words != "UNKNOWN"]
    return known[0] if known else "unknown"


def parts_of(licence: str) -> list[str]:
    """The licences of an expression that all have to be kept; of alternatives, the whole expression's parts."""
    return [part.strip("() ") for part in re.split(r" AND | OR ", licence)]


def packages() -> dict[str, metadata.Distribution]:
    """What is installed, by name: of several copies that which Python imports, the first on its path."""
    return {canonicalize_name(package.name): package for package in reversed([*metadata.distributions()])}


def licences() -> dict[str, tuple[str, str]]:
    """(version, licence) of every package of the lock that belongs here."""
    installed = packages()
    by_name = {}
    for entry in read_lock(DEV):
        if entry.applies and entry.name in installed:
            about = installed[entry.name].metadata
            by_name[entry.name] = (entry.version, licence_of(about, about.get_all("Classifier") or []))
    return by_name


def licences_page() -> str:
    """docs/licences.md."""
    rows = [f"| {name} | {version} | {licence} |" for name, (version, licence) in sorted(licences().items())]
    return "\n".join(
        [
            "# Licences of dependencies",
            "",
            "What the development environment consists of on Linux, in the versions of `.ci/dev.lock`, as the packages",
            "state it. `make licences` writes this page; a licence beyond those that `tools/supply.py`",
            "allows fails `make audit`. The library itself needs torch, numpy, scipy, safetensors, filelock, pyarrow,",
            "jinja2, typer, rich, and what these ask for. PyPI's torch for Linux also asks for CUDA libraries",
            "(`.ci/cuda.lock`), which have NVIDIA's own licence.",
            "",
            "| Package | Version | Licence |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


# ---- check ---------------------------------------------------------------------------------------------------------


def differences() -> list[str]:
    """What differs between this environment, its licences and the lock; nothing if all is as it should be."""
    installed = packages()
    lines = []
    for entry in (entry for entry in read_lock(DEV) if entry.applies):
        if entry.name not in installed:
            lines.append(f"{entry.name} {entry.version} is locked, but not installed")
        elif (there := installed[entry.name].version.split("+")[0]) != entry.version:
            lines.append(f"{entry.name} is installed in version {there}, but {entry.version} is locked")
        else:
            lines += changed_files(installed[entry.name])
    for name, (_, licence) in licences().items():
        if not set(parts_of(licence)) <= ALLOWED:
            lines.append(f"{name} has the licence {licence}, which is not among those allowed")
    if LICENCES.read_text() != licences_page():
        lines.append(f"{LICENCES.relative_to(ROOT)} is out of date: make licences")
    return lines


def changed_files(package: metadata.Distribution) -> list[str]:
    """Files of a package that are not those of its wheel, whose hash was checked when it was installed."""
    record = package.read_text("RECORD")
    if record is None:
        return [f"{package.name} has no record of its files"]
    changes = []
    for name, digest, _ in csv.reader(io.StringIO(record)):
        kind, _, expected = digest.partition("=")
        if not expected:  # caches of Python, and the record itself
            continue
        path = Path(str(package.locate_file(name)))
        if not path.is_file():
            changes.append(f"{package.name}: {name} is missing")
        elif _digest(path, kind) != expected:
            changes.append(f"{package.name}: {name} is not the file that was installed")
    return changes


def _digest(path: Path, kind: str) -> str:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, kind).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def check() -> int:
    """Prints what differs; 0 if nothing does."""
    lines = differences()
    for line in lines:
        print(line, file=sys.stderr)
    if not lines:
        print(f"{sum(entry.applies for entry in read_lock(DEV))} packages are those of the lock, with allowed licences")
    return int(bool(lines))


# ---- audit ---------------------------------------------------------------------------------------------------------


def audit() -> int:
    """Asks the Python Packaging Advisory Database about everything locked, by pip-audit: 0, or 1 with what is known, or
    `UNREACHABLE` if it does not answer."""
    command = ["pip-audit", "--strict", "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    run = subprocess.run([*command, "--requirement", str(DEV)], capture_output=True, text=True)
    print(run.stdout, end="")
    return verdict(run.returncode, run.stdout, run.stderr)


def verdict(status: int, stdout: str, stderr: str) -> int:
    """What pip-audit's end means: vulnerabilities are listed in its output; everything else is an answer missing."""
    if status == 0:
        print("no known vulnerabilities")
        return 0
    if re.search(r"Found \d+ known vulnerabilit", stderr + stdout):
        print(stderr, file=sys.stderr, end="")
        return 1
    reason = stderr.strip().splitlines()[-1] if stderr.strip() else f"pip-audit ended with status {status}"
    print(f"NOT CHECKED for known vulnerabilities: the advisory database gave no answer ({reason})", file=sys.stderr)
    return UNREACHABLE


def wants_cuda() -> bool:
    """Whether the torch that is installed asks for CUDA libraries that are not."""
    installed = packages()
    asked = [Requirement(words) for words in installed["torch"].requires or []]
    return any(
        is_cuda(need.name) and canonicalize_name(need.name) not in installed
        for need in asked
        if need.marker is None or need.marker.evaluate({"extra": ""})
    )


def main(task: str) -> int:
    """Runs one of the tasks."""
    if task == "lock":
        lock()
    elif task == "licences":
        LICENCES.write_text(licences_page())
        print(f"{LICENCES.relative_to(ROOT)}: {len(licences())} packages")
    elif task == "check":
        return check()
    elif task == "audit":
        return audit()
    elif task == "cuda":
        if wants_cuda():
            install = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--require-hashes",
                "--no-deps",
                "--requirement",
            ]
            subprocess.run([*install, str(CUDA)], check=True)
    else:
        raise SystemExit(f"unknown task {task!r}: lock, licences, check, audit or cuda")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
