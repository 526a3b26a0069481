"""Rules of the package: imports go down only, importing is fast, and no heavy package is needed for it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import geoflow_fast

PACKAGE = Path(geoflow_fast.__file__).parent
# Packages and flat modules from the top down. A module may import from its own layer and from those below.
LAYERS = (
    ("cli", "__main__"),
    ("demo",),
    ("evaluation", "explore"),
    ("jobs", "encoders", "stores"),
    ("decisions",),
    ("retrieval",),
    ("head",),
    ("training", "likelihood"),
    ("flow",),
    ("manifolds",),
    ("data", "ops"),
    ("kernels",),
    ("worlds", "spherical", "noise"),
    ("geometry", "directions", "linear"),
    ("distributed", "runtime"),
)
LEVEL = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}


def imported_packages(path: Path) -> set[str]:
    """Packages and flat modules of geoflow_fast that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "geoflow_fast" and not node.level:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("geoflow_fast."):
            names.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("geoflow_fast.")}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: write imports in full"
    return names


def test_imports_go_down_only():
    upward = []
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        for target in imported_packages(path) - {"__version__"}:
            if LEVEL[target] < LEVEL[package]:
                upward.append(f"{path.relative_to(PACKAGE)} imports {target}")
    assert not upward


def test_few_modules_are_flat():
    assert len(list(PACKAGE.glob("*.py"))) <= 12


def test_only_native_imports_the_extension():
    users = [path.name for path in PACKAGE.rglob("*.py") if "geoflow_fast._C" in path.read_text()]
    assert users == ["extension.py"]


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **environment}).stdout


def test_import_is_light(tmp_path):
    """The import alone costs next to nothing. The first use of a name that needs torch takes under 0.3 s of processor
    time beyond torch and imports none of the heavy, optional packages."""
    code = """
import sys, time
start = time.process_time()
import geoflow_fast
print(time.process_time() - start)
assert "torch" not in sys.modules and "numpy" not in sys.modules
import torch
start = time.process_time()
geoflow_fast.RetrievalEntropy, geoflow_fast.BayesReranker, geoflow_fast.train
print(time.process_time() - start)
heavy = {"triton", "scipy", "ot", "matplotlib", "pyarrow", "open_clip", "PIL", "gpytorch", "typer", "rich"}
heavy |= {"transformers"}
print(sorted(heavy & set(sys.modules)))
"""
    # An installed package has its bytecode; the first attempt writes it here, whatever the environment says.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    for attempts_left in (1, 0):
        alone, used, heavy = run_python(code, **bytecode).splitlines()
        assert heavy == "[]"
        if not attempts_left or (float(alone) < 0.05 and float(used) < 0.3):
            break
    assert float(alone) < 0.05
    assert float(used) < 0.3


def test_import_works_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import geoflow_fast as gf
print(gf.backends()["masked_interpolant"]["cpu"])
"""
    assert run_python(code, CUDA_VISIBLE_DEVICES="").strip() == "available"
