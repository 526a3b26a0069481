"""Run by `make test-wheel` in an environment that has only the wheel: what an editable install hides shows here.

python wheel_smoke.py README.md: every command of the README's first page runs, without Triton and without any extra.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import geoflow_fast as gf
import geoflow_fast.kernels
from geoflow_fast.noise import sample_uniform

FEWER = {"steps=200": "steps=20", "max_queries=200": "max_queries=100", "text[:500])": "text[:60])"}
FEWER |= {"torch.arange(500)": "torch.arange(60)"}
"""What makes the page's Python small."""
SMALLER = {"train": ["--steps", "20"]}
ALONE = ("doctor",)
"""Commands that need no argument; of others that the words of the page name, the help is shown."""
EXTRAS = ("triton", "matplotlib", "open_clip", "transformers", "datasets", "pandas", "huggingface_hub", "gpytorch")


def check_installation() -> None:
    """The wheel is what was imported, and brings none of the packages of the extras."""
    installed = Path(gf.__file__).resolve()
    assert "site-packages" in installed.parts, f"imported {installed}, not the installed wheel"
    assert "site-packages" in Path(geoflow_fast.kernels.__file__).resolve().parts
    assert (installed.parent / "py.typed").exists(), "py.typed is missing from the wheel"
    assert [name for name in EXTRAS if importlib.util.find_spec(name)] == [], "the core brings packages of extras"
    table = gf.backends()
    assert table["masked_interpolant"]["cpu"] == "available", table
    assert ".whl[gpu]'" in table["masked_interpolant"]["triton"], table  # how to get Triton, from this very wheel


def check_kernels() -> None:
    """The compiled code gives what its twin in torch gives."""
    image0, text0, image1, text1 = (sample_uniform(33, d) for d in (20, 10, 20, 10))
    t, direction = torch.rand(33), torch.arange(33, dtype=torch.int8) % 3
    fast = gf.ops.masked_interpolant(image0, text0, image1, text1, t, direction, backend="cpu")
    slow = gf.ops.masked_interpolant(image0, text0, image1, text1, t, direction, backend="reference")
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(fast, slow))


def run_first_page(readme: Path) -> list[str]:
    """Runs the commands and the Python of the page from top to bottom in an empty folder, and returns what ran."""
    ran = []
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE):
        if language == "python":
            for many, few in FEWER.items():
                code = code.replace(many, few)
            run([sys.executable, "-c", code])
            ran.append("python")
        for line in code.splitlines() if language == "" else ():
            words = shlex.split(line.split("  #")[0])
            if words[:1] == ["geoflow"]:  # the lines of make are for a checkout
                run([str(Path(sys.executable).with_name("geoflow")), *words[1:], *SMALLER.get(words[1], [])])
                ran.append(" ".join(words[:2]))
    for command in re.findall(r"`(geoflow [a-z]+)`", readme.read_text().split("## ")[0]):
        if command not in ran:
            name = command.split()[1]
            run([str(Path(sys.executable).with_name("geoflow")), name, *([] if name in ALONE else ["--help"])])
            ran.append(command)
    return ran


def run(command: list[str]) -> None:
    """Runs a command; what it says is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def write_embeddings() -> None:
    """The files that the page's commands read."""
    image, text, _ = gf.worlds.ConceptWorld().sample(360, generator=torch.Generator().manual_seed(0))
    for part, rows in (("", slice(0, 300)), ("new_", slice(300, None))):
        np.save(f"{part}images.npy", image[rows].numpy())
        np.save(f"{part}texts.npy", text[rows].numpy())


def megabytes(folder: Path) -> float:
    """The size of what is installed."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


if __name__ == "__main__":
    page, begin = Path(sys.argv[1]).resolve(), time.monotonic()
    check_installation()
    check_kernels()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_embeddings()
        ran = run_first_page(page)
        os.chdir("/" if os.name == "posix" else page.anchor)
    assert {"python", "geoflow train", "geoflow rerank", "geoflow doctor"} <= set(ran), ran
    packages = Path(sysconfig.get_paths()["purelib"])
    without = megabytes(packages) - megabytes(packages / "torch")
    print(f"geoflow_fast {gf.__version__} works from its wheel: {', '.join(ran)} in {time.monotonic() - begin:.0f} s")
    print(
        f"installed: {megabytes(packages):.0f} MB, of which torch {megabytes(packages / 'torch'):.0f} MB, "
        f"the rest {without:.0f} MB, this package {megabytes(packages / 'geoflow_fast'):.1f} MB"
    )
