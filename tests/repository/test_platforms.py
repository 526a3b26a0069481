"""What a machine without this one's system calls needs: nothing that only Unix has is imported or asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import geoflow_fast

PACKAGE = Path(geoflow_fast.__file__).parent
UNIX_ONLY = {
    "fcntl",
    "resource",
    "pwd",
    "grp",
    "termios",
    "tty",
    "pty",
    "syslog",
    "posix",
    "curses",
    "readline",
    "spwd",
}
# What Windows lacks is taken away after torch and its kin are loaded; then every module is imported and pairs pass
# through files, a network and a search.
WITHOUT = """
import importlib, mmap, os, pkgutil, sys
import torch, numpy, scipy.stats, pyarrow.parquet, typer.testing, filelock, rich.progress, safetensors.torch
import importlib.metadata, ctypes, subprocess, multiprocessing.connection, hypothesis
for name in %r:
    sys.modules[name] = None
for name in ("sched_getaffinity", "getloadavg", "O_NOFOLLOW", "O_CLOEXEC", "sysconf", "fork", "getuid"):
    if hasattr(os, name):
        delattr(os, name)
for name in [name for name in dir(mmap) if name.startswith("MADV_")]:
    delattr(mmap, name)
sys.modules["geoflow_fast._C"] = None  # nothing is compiled there
import geoflow_fast as gf
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops import extension
extension.loaded.cache_clear()
extension.loaded = lambda: None
for module in pkgutil.walk_packages(gf.__path__, "geoflow_fast."):
    if not module.name.startswith(("geoflow_fast.kernels.", "geoflow_fast._C", "benchmarks.methods.baselines.grove")):
        importlib.import_module(module.name)
pairs = gf.EmbeddingPairs.from_arrays(*(sample_uniform(120, 8) for _ in range(2)))
pairs.save("pairs")
pairs = gf.EmbeddingPairs.open("pairs")
head = gf.PosteriorHead.fit(pairs, gf.HeadConfig(steps=2, hidden=8, points=1, bank=8), progress=False)
head.save_pretrained("head")
gallery = gf.Gallery("pairs/img_emb")
post = gf.RetrievalEntropy(gf.PosteriorHead.from_pretrained("head"), gallery)(pairs[[0, 1, 2]][1])
assert post.entropy.isfinite().all()
assert set(gf.backends()["adaln"]) >= {"cpu"} and gf.backends()["adaln"]["cpu"] != "available"
from geoflow_fast.cli import app
out = typer.testing.CliRunner().invoke(app, ["doctor"])
assert out.exit_code == 0, out.output
print("works")
"""


def test_no_module_imports_what_only_unix_has():
    imports = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:  # at the level of the module
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imports += [f"{path.name}: {name}" for name in names if name.split(".")[0] in UNIX_ONLY]
    assert imports == []


def test_everything_imports_and_a_head_is_fitted_without_unix(tmp_path):
    code = WITHOUT % sorted(UNIX_ONLY - {"posix", "curses", "readline"})  # which Python itself needs here
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.strip().endswith("works"), run.stderr
