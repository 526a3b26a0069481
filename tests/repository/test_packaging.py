"""The build itself: with and without CUDA, with a broken compiler, and on processors without AVX2."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement

from geoflow_fast.runtime.files import read_toml
from tools import cuda_build

pytest.importorskip("pybind11.setup_helpers")  # before a test changes the platform by which it is set up

ROOT = Path(__file__).parents[2]


def build(target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(target),
        "--build-temp",
        str(target / "tmp"),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


def cuda_status(target: Path) -> str:
    code = f"import sys; sys.path.insert(0, {str(target / 'geoflow_fast')!r}); import _C; print(_C.cuda_status())"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
def test_build_without_cuda_says_so_at_run_time(tmp_path):
    result = build(tmp_path, GEOFLOW_CUDA="0")
    assert result.returncode == 0, result.stderr
    assert "no CUDA code, since it was built with GEOFLOW_CUDA=0" in cuda_status(tmp_path)


@pytest.mark.slow
def test_build_without_nvcc_is_cpu_only(tmp_path):
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if not (Path(f) / "nvcc").exists()]
    shims = tmp_path / "bin"  # the compilers may sit in the same folder as nvcc
    shims.mkdir()
    for tool in ("gcc", "g++", "cc", "c++", "ld", "as"):
        path = shutil.which(tool)
        if path is not None:
            (shims / tool).symlink_to(path)
    result = build(tmp_path / "out", PATH=os.pathsep.join([str(shims), *folders]))
    assert result.returncode == 0, result.stderr
    assert "no CUDA code, since nvcc is not on PATH" in cuda_status(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(cuda_build.nvcc() is None, reason="nvcc is not on PATH")
def test_build_with_cuda_carries_every_architecture(tmp_path):
    """Machine code for all of them, and PTX of the newest for GPUs to come; no GPU is needed to build it."""
    result = build(tmp_path, GEOFLOW_CUDA="1")
    assert result.returncode == 0, result.stderr
    assert "no CUDA code" not in cuda_status(tmp_path)
    (extension,) = (tmp_path / "geoflow_fast").glob("_C*")
    embedded = {}
    for what in ("--list-elf", "--list-ptx"):
        listing = subprocess.check_output([cuda_build.binary_tool("cuobjdump"), what, extension], text=True)
        embedded[what] = set(re.findall(r"\bsinkhorn\.(sm_\d+)", listing))
    architectures = cuda_build.ARCHITECTURES
    assert embedded == {"--list-elf": set(architectures), "--list-ptx": {architectures[-1]}}


def test_insisting_on_cuda_without_nvcc_is_an_error(tmp_path):
    result = build(tmp_path, GEOFLOW_CUDA="1", PATH=str(tmp_path))
    assert result.returncode != 0
    assert "nvcc is not on PATH" in result.stderr


def test_unknown_value_of_geoflow_cuda_is_an_error(tmp_path):
    result = build(tmp_path, GEOFLOW_CUDA="perhaps")
    assert result.returncode != 0
    assert "GEOFLOW_CUDA must be" in result.stderr


def test_a_failing_nvcc_fails_the_build(tmp_path):
    """A broken toolchain must not quietly give a CPU-only build."""
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho 'nvcc: broken' >&2\nexit 1\n")
    fake.chmod(0o755)
    result = build(tmp_path / "out", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", CXX="true", CC="true")
    assert result.returncode != 0
    assert "nvcc: broken" in result.stderr


def with_nvcc_of(folder: Path, release: str) -> str:
    """A search path whose nvcc says that it is of this release, and cannot compile."""
    fake = folder / "nvcc"
    fake.write_text(
        f"#!/bin/sh\n[ \"$1\" = --version ] && echo 'Cuda compilation tools, release {release}' && exit 0\n"
        "echo 'nvcc fatal: Unsupported gpu architecture' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_an_old_nvcc_gives_a_build_without_cuda_that_says_why(tmp_path):
    """`pip install` must not fail where some old toolkit is on PATH. No compiler runs here: all of them are `true`."""
    path = with_nvcc_of(tmp_path, "12.4")
    result = build(tmp_path / "out", PATH=path, CXX="true", CC="true")
    assert result.returncode == 0, result.stderr
    assert "building without CUDA: nvcc 12.4 on PATH is older than 12.8" in result.stderr
    insisting = build(tmp_path / "out", PATH=path, CXX="true", CC="true", GEOFLOW_CUDA="1")
    assert insisting.returncode != 0
    assert "GEOFLOW_CUDA=1, but nvcc 12.4 on PATH is older than 12.8" in insisting.stderr


@pytest.mark.parametrize(("gpus", "wish"), [("GPU 0: a card", "auto"), ("No devices were found", "1")])
def test_a_new_enough_nvcc_is_used_with_a_gpu_or_on_demand(tmp_path, gpus, wish):
    path = with_gpus(tmp_path, gpus, with_nvcc_of(tmp_path, "12.8"))
    result = build(tmp_path / "out", PATH=path, CXX="true", CC="true", GEOFLOW_CUDA=wish)
    assert result.returncode != 0
    assert "Unsupported gpu architecture" in result.stderr


@pytest.mark.parametrize(
    ("listed", "code"),
    [
        ("No devices were found", 6),
        ("No devices were found", 0),
        ("GPU access blocked by the operating system", 255),
        ("Failed to initialize NVML: no GPU", 0),
        ("GPU 0: a card that the driver lost", 15),
    ],
)
def test_without_a_gpu_the_build_goes_without_cuda_and_says_why(tmp_path, listed, code):
    path = with_gpus(tmp_path, listed, with_nvcc_of(tmp_path, "12.8"), code)
    result = build(tmp_path / "out", PATH=path, CXX="true", CC="true")
    assert result.returncode == 0, result.stderr
    assert "building without CUDA: no GPU was visible when it was built" in result.stderr


def with_gpus(folder: Path, listed: str, path: str, code: int = 0) -> str:
    """The search path with a driver that lists these GPUs and ends with this exit code."""
    fake = folder / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\necho '{listed}'\nexit {code}\n")
    fake.chmod(0o755)
    return f"{folder}{os.pathsep}{path}"


def test_no_intrinsics_outside_their_guard():
    """Every use of x86 intrinsics sits between `#if defined(__AVX2__)` (or its like) and its `#endif`."""
    unguarded = []
    for path in sorted((ROOT / "csrc").rglob("*.[hc]*")):
        guards: list[bool] = []
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if re.match(r"\s*#\s*if", line):
                guards.append(bool(re.search(r"__AVX2__|__AVX512|__x86_64__|__F16C__", line)) and "!" not in line)
            elif re.match(r"\s*#\s*(else|elif)", line):
                guards[-1] = bool(re.search(r"__AVX2__|__AVX512|__x86_64__|__F16C__", line))
            elif re.match(r"\s*#\s*endif", line):
                guards.pop()
            elif re.search(r"\b_mm(256|512)?_|immintrin|\b__m(128|256|512)", line) and not any(guards):
                unguarded.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not unguarded


def project() -> dict[str, Any]:
    """What pyproject.toml says."""
    return read_toml(ROOT / "pyproject.toml")


def test_the_core_is_light():
    """Triton and everything else that only some commands need is in extras."""
    about = project()["project"]
    core = {Requirement(words).name for words in about["dependencies"]}
    light = {"torch", "numpy", "scipy", "safetensors", "filelock", "typer", "rich", "pyarrow", "jinja2", "tomli"}
    assert core == light
    extras = about["optional-dependencies"]
    with_triton = {name for name, needs in extras.items() if any(Requirement(x).name == "triton" for x in needs)}
    assert with_triton == {"gpu", "test"}


def test_python_versions_are_declared_as_they_are_built():
    about = project()
    minor = [f"3.{k}" for k in range(10, 15)]
    declared = [words.split(" :: ")[-1] for words in about["project"]["classifiers"] if ":: Python :: 3." in words]
    assert declared == minor
    assert about["project"]["requires-python"] == ">=3.10"
    build = about["tool"]["cibuildwheel"]
    assert build["build"].split() == [f"cp{version.replace('.', '')}-*" for version in minor]
    assert (build["linux"]["archs"], build["macos"]["archs"]) == (["x86_64", "aarch64"], ["x86_64", "arm64"])
    assert about["project"]["urls"]


def setup_arguments(monkeypatch, platform: str) -> dict[str, Any]:
    """What setup.py asks setuptools for on a platform."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: asked.update(arguments))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("GEOFLOW_CUDA", "0")
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return asked


def test_a_mac_builds_with_openmp_where_libomp_is(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))  # without Homebrew
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setenv("LIBOMP_PREFIX", str(tmp_path))
    (alone,) = setup_arguments(monkeypatch, "darwin")["ext_modules"]
    assert not any("omp" in flag for flag in (*alone.extra_compile_args, *alone.extra_link_args))
    assert "built for one thread" in capfd.readouterr().err
    monkeypatch.setenv("GEOFLOW_OPENMP", "1")
    with pytest.raises(SystemExit, match="brew install libomp"):
        setup_arguments(monkeypatch, "darwin")
    for name in ("include/omp.h", "lib/libomp.dylib"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (threaded,) = setup_arguments(monkeypatch, "darwin")["ext_modules"]
    assert ["-Xpreprocessor", "-fopenmp", f"-I{tmp_path}/include"] == threaded.extra_compile_args[-3:]
    rpaths = [flag for flag in threaded.extra_link_args if "rpath" in flag]
    assert rpaths[0] == "-Wl,-rpath,@loader_path/../torch/lib"  # the one that torch has loaded
    assert "-lomp" in threaded.extra_link_args


def test_nothing_is_compiled_on_windows(monkeypatch):
    assert setup_arguments(monkeypatch, "win32")["ext_modules"] == []


def test_the_build_tells_whether_it_has_threads():
    from geoflow_fast.ops import extension

    assert extension.loaded().openmp() >= 201307
    assert extension.one_thread_only() is None


def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {name.split("/")[0] for name in files} == {"geoflow_fast"}
    assert {"geoflow_fast/__init__.pyi", "geoflow_fast/py.typed", "geoflow_fast/kernels/gallery.py"} <= set(files)
    assert [name for name, path in files.items() if "unittest" in path.read_text()] == []


@pytest.mark.slow
def test_source_distribution_has_what_a_build_needs(tmp_path):
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), "."]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "csrc").rglob("*")
        if p.suffix in {".h", ".cuh", ".cpp", ".cu", ".json"}
    }
    wanted |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "kernels").glob("*.py")}
    assert wanted <= names
