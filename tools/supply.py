"""`python -m tools.supply` writes the locks of .ci/.

Each lock holds what it adds to those before it: `demo.lock` what `make demo` installs, `test.lock` what `make test`
adds, `dev.lock` what documentation and benchmarks add. They come from pyproject.toml and constraints.txt, for every
platform, with the hashes of all files of each release.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / ".ci"
PYTHON = "3.11"
"""The oldest for which the pinned versions are made."""
ADDED = {
    "demo": ("eval",),
    "test": ("test", "gpu", "ot", "encoders", "data", "hub"),
    "dev": ("bench", "docs"),
}
"""The extras of each lock."""
TITLES = {
    "demo": "What `make setup` installs",
    "test": "What `make test` installs besides",
    "dev": "What `make docs` and `make bench` install besides",
}
BUILD = "setuptools>=77\npybind11>=2.13\n"
"""What builds the extension: the build-system table of pyproject.toml."""
AUDIT = "uv\npip-audit\npip-licenses\n"
"""Tools that look at the environment from outside."""
ELSEWHERE = {("torch", "2.13.0"): ("6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",)}
"""SHA-256 of wheels that PyPI does not carry: torch's CPU build for Linux, Python 3.11."""


def resolved(extras: Iterable[str], *files: str, stdin: str) -> list[str]:
    """The packages, each an entry of a lock, that uv finds for these extras, requirement files and further lines."""
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--universal", "--python-version", PYTHON]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--constraint", "constraints.txt"]
    command += [word for extra in extras for word in ("--extra", extra)]
    text = subprocess.run([*command, *files, "-"], cwd=ROOT, input=stdin, check=True, stdout=subprocess.PIPE, text=True)
    return [with_other_files(entry) for entry in re.findall(r"^\S.*(?:\n[ \t]+.*)*", text.stdout, re.MULTILINE)]


def name_of(entry: str) -> str:
    """The package of an entry."""
    return canonicalize_name(Requirement(re.split(r"\s*\\\n", entry)[0]).name)


def with_other_files(entry: str) -> str:
    """The entry, with wheels added that PyPI does not carry."""
    words = Requirement(re.split(r"\s*\\\n", entry)[0])
    pinned = (name_of(entry), str(words.specifier).removeprefix("=="))
    return entry + "".join(f" \\\n    --hash=sha256:{value}" for value in ELSEWHERE.get(pinned, ()))


def is_cuda(entry: str) -> bool:
    """Whether it is one of the CUDA libraries that PyPI's torch for Linux asks for."""
    return entry.startswith(("cuda-", "nvidia-"))


def lock() -> None:
    """Writes all lock files."""
    left = resolved(sum(ADDED.values(), ()), "pyproject.toml", stdin=BUILD)
    write("cuda", "What PyPI's torch for Linux needs besides", filter(is_cuda, left))
    left = [entry for entry in left if not is_cuda(entry)]
    later = {"triton"}  # PyPI's torch asks for it, but the demo does not import it
    extras: tuple[str, ...] = ()
    for name, added in ADDED.items():
        extras += added
        wanted = {name_of(entry) for entry in resolved(extras, "pyproject.toml", stdin=BUILD)} - later
        write(name, TITLES[name], (entry for entry in left if name_of(entry) in wanted))
        left, later = [entry for entry in left if name_of(entry) not in wanted], set()
    write("tools", "What `make lock` and `make audit` run", resolved((), stdin=AUDIT))


def write(name: str, title: str, entries: Iterable[str]) -> None:
    """One lock file, with a line on how it is made."""
    path, lines = LOCKS / f"{name}.lock", [f"# {title}: `make lock` writes it.", *entries]
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(lines) - 1} packages")


if __name__ == "__main__":
    lock()
