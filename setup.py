"""Builds `geoflow_fast._C`: C++ for every CPU, AVX2 and AVX-512 variants chosen at run time, CUDA if nvcc is there.

The extension takes raw pointers and includes no torch header, so neither torch nor a GPU is needed to build it.
CUDA code is built where nvcc exists and a GPU is visible. `GEOFLOW_CUDA=0` builds without it even there;
`GEOFLOW_CUDA=1` builds it without a GPU, too, and makes a missing nvcc, or one that is too old, an error. A build
without CUDA says why in `gf.backends()`. `GEOFLOW_BUILD_JOBS` is the number of compilers at once, by default all cores.
`GEOFLOW_OPENMP=0` builds kernels of one thread; `GEOFLOW_OPENMP=1` makes a missing OpenMP an error.
On Windows nothing is compiled, as the kernels are written in the vector types of gcc and clang: torch does the work.
`GEOFLOW_SANITIZE=1` builds with AddressSanitizer and UndefinedBehaviorSanitizer: `make test-sanitize`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
X86_64 = platform.machine().lower() in {"x86_64", "amd64"}
# Real code for the generations of data-centre and of desktop GPUs, and PTX of the newest for GPUs to come.
CUDA_GENERATIONS = (80, 86, 89, 90, 100, 120)
CUDA_ARCHITECTURES = [
    *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in CUDA_GENERATIONS),
    f"-gencode=arch=compute_{CUDA_GENERATIONS[-1]},code=compute_{CUDA_GENERATIONS[-1]}",
]
OLDEST_NVCC = (12, 8)  # the first that knows all of them


def find_nvcc() -> tuple[str | None, str]:
    """Path of nvcc, or None for a CPU-only build and the reason for it."""
    wish = os.environ.get("GEOFLOW_CUDA", "auto")
    if wish not in {"auto", "0", "1"}:
        raise SystemExit(f"GEOFLOW_CUDA must be 0, 1 or unset, not {wish!r}")
    if wish == "0":
        return None, "it was built with GEOFLOW_CUDA=0"
    nvcc = shutil.which("nvcc")
    reason = "nvcc is not on PATH" if nvcc is None else refusal(nvcc)
    if wish == "1" and reason is not None:
        raise SystemExit(f"GEOFLOW_CUDA=1, but {reason}")
    if wish == "auto" and reason is None and not gpu_is_visible():
        reason = "no GPU was visible when it was built"
    if reason is None:
        return nvcc, ""
    if nvcc is not None:
        sys.stderr.write(f"geoflow_fast: building without CUDA: {reason}\n")
    return None, reason


def refusal(nvcc: str) -> str | None:
    """Why this nvcc cannot build the CUDA part, if it cannot. One that does not run at all is an error."""
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+)\.(\d+)", answer.stdout)
    if answer.returncode != 0 or release is None:
        raise SystemExit(f"{nvcc} --version failed; GEOFLOW_CUDA=0 builds without it:\n{answer.stdout}{answer.stderr}")
    version = int(release[1]), int(release[2])
    if version >= OLDEST_NVCC:
        return None
    return f"nvcc {release[1]}.{release[2]} on PATH is older than {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]}"


def gpu_is_visible() -> bool:
    """Whether the driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True)
    return answer.returncode == 0 and any(line.startswith("GPU ") for line in answer.stdout.splitlines())


def targets() -> dict[str, dict[str, list[str]]]:
    """The instruction sets that kernels are compiled for, each with its flags and the sources of csrc/cpu that it has;
    see csrc/cpu/cpu_features.h. Other machines than x86-64 have the baseline alone."""
    table: dict[str, dict[str, list[str]]] = json.loads((ROOT / "csrc" / "cpu" / "targets.json").read_text())
    return table if X86_64 else {"baseline": table["baseline"]}


def openmp_flags() -> tuple[list[str], list[str]]:
    """Compile and link flags for OpenMP; empty, with a warning, where there is none: loops then run on one thread."""
    wish = os.environ.get("GEOFLOW_OPENMP", "auto")
    if wish not in {"auto", "0", "1"}:
        raise SystemExit(f"GEOFLOW_OPENMP must be 0, 1 or unset, not {wish!r}")
    if wish == "0":
        return [], []
    if sys.platform != "darwin":
        return ["-fopenmp"], ["-fopenmp"]
    folder = find_libomp()
    if folder is None:
        problem = (
            "libomp was not found, which Apple's clang needs for OpenMP: brew install libomp, or set LIBOMP_PREFIX"
        )
        if wish == "1":
            raise SystemExit(f"GEOFLOW_OPENMP=1, but {problem}")
        print(f"warning: {problem}. The kernels are built for one thread.", file=sys.stderr)
        return [], []
    # torch's own copy comes first: a process that loads two copies of the library is stopped by the second.
    places = ["@loader_path/../torch/lib", f"{folder}/lib"]
    link = [f"-L{folder}/lib", "-lomp", *(f"-Wl,-rpath,{at}" for at in places)]
    return ["-Xpreprocessor", "-fopenmp", f"-I{folder}/include"], link


def find_libomp() -> Path | None:
    """The folder of LLVM's OpenMP on a Mac: that of LIBOMP_PREFIX, of conda or of Homebrew."""
    prefixes = [os.environ.get("LIBOMP_PREFIX"), os.environ.get("CONDA_PREFIX")]
    if shutil.which("brew"):
        asked = subprocess.run(["brew", "--prefix", "libomp"], capture_output=True, text=True)
        prefixes.append(asked.stdout.strip())
    for prefix in filter(None, prefixes):
        folder = Path(prefix)
        if (folder / "include/omp.h").is_file() and (folder / "lib/libomp.dylib").exists():
            return folder
    return None


def sanitizer_flags() -> list[str]:
    """Flags of compiler and linker for a build in which a memory error or undefined behaviour aborts."""
    wish = os.environ.get("GEOFLOW_SANITIZE", "0")
    if wish not in {"0", "1"}:
        raise SystemExit(f"GEOFLOW_SANITIZE must be 0, 1 or unset, not {wish!r}")
    if wish == "0":
        return []
    # -O1 keeps every access that the source makes; the checks of the standard library's containers come with it.
    checks = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
    return [*checks, "-fno-omit-frame-pointer", "-g", "-O1", "-D_GLIBCXX_ASSERTIONS"]


class BuildExtension(build_ext):
    """Compiles the kernels of csrc/cpu once for every target, and `*.cu` with nvcc."""

    def build_extensions(self) -> None:
        self.compiler.src_extensions.append(".cu")
        compile_host = self.compiler._compile

        def compile_any(obj: str, src: str, ext: str, cc_args: list[str], post: list[str], pp_opts: list[str]) -> None:
            if src.endswith(".cu"):
                self.spawn([NVCC, *pp_opts, "-c", src, "-o", obj, *NVCC_FLAGS])
                return
            compile_host(obj, src, ext, cc_args, post, pp_opts)

        self.compiler._compile = compile_any
        if NVCC is not None:
            # nvcc knows where its static runtime lives even when the one on PATH is a wrapper script.
            self.compiler.compiler_cxx = [NVCC]  # setuptools links C++ with this one and compiles with compiler_so_cxx
            self.compiler.linker_so = self.compiler.linker_so_cxx = [NVCC, "-shared", "--cudart=static"]
        super().build_extensions()
        if sys.platform == "darwin" and "-lomp" in omp_link:
            for extension in self.extensions:
                find_libomp_by_rpath(Path(self.get_ext_fullpath(extension.name)))

    def build_extension(self, ext: Extension) -> None:
        for name, target in targets().items():
            ext.extra_objects += self.compiler.compile(
                [f"csrc/cpu/{source}.cpp" for source in target["sources"]],
                output_dir=os.path.join(self.build_temp, name),
                macros=[("GEOFLOW_TARGET", name)],
                include_dirs=ext.include_dirs,
                extra_postargs=[*ext.extra_compile_args, *target["flags"]],
                depends=ext.depends,
            )
        super().build_extension(ext)


def find_libomp_by_rpath(built: Path) -> None:
    """Makes an extension look for libomp in its list of places instead of the one place where it was built."""
    needed = subprocess.run(["otool", "-L", str(built)], check=True, capture_output=True, text=True).stdout
    for line in needed.splitlines():
        name = line.split()[0] if line.split() else ""
        if name.endswith("/libomp.dylib") and not name.startswith("@rpath/"):
            subprocess.run(["install_name_tool", "-change", name, "@rpath/libomp.dylib", str(built)], check=True)
            subprocess.run(["codesign", "--force", "--sign", "-", str(built)], check=True)  # the change voids it


NVCC, WITHOUT_CUDA = find_nvcc()
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-lineinfo",
    "--threads=0",
    *CUDA_ARCHITECTURES,
]
omp_compile, omp_link = openmp_flags()
if NVCC is not None:
    omp_link = [f"-Xcompiler={flag}" for flag in omp_link]


def sources(*patterns: str) -> list[str]:
    paths = [path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)]
    return sorted(paths)


ParallelCompile("GEOFLOW_BUILD_JOBS").install()
extension = Pybind11Extension(
    "geoflow_fast._C",
    sources("csrc/bindings.cpp", "csrc/cpu/dispatch.cpp", *(["csrc/cuda/*.cu"] if NVCC else [])),
    depends=sources("csrc/**/*.h", "csrc/**/*.cuh", "csrc/cpu/*.cpp", "csrc/cpu/targets.json"),
    include_dirs=["csrc"],
    cxx_std=17,
    define_macros=[("GEOFLOW_WITH_CUDA", "1") if NVCC else ("GEOFLOW_WITHOUT_CUDA", f'"{WITHOUT_CUDA}"')],
    extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", *omp_compile, *sanitizer_flags()],
    extra_link_args=[*omp_link, *sanitizer_flags()],
)

setup(
    packages=[
        "geoflow_fast",
        *(f"geoflow_fast.{path.parent.name}" for path in sorted(ROOT.glob("geoflow_fast/*/__init__.py"))),
        "geoflow_fast.runtime.pages",
        "geoflow_fast.kernels",
    ],
    package_dir={"geoflow_fast": "geoflow_fast", "geoflow_fast.kernels": "kernels"},
    package_data={"geoflow_fast": ["py.typed", "*.pyi"], "geoflow_fast.runtime.pages": ["*.j2", "*.css", "*.js"]},
    ext_modules=[] if sys.platform == "win32" else [extension],
    cmdclass={"build_ext": BuildExtension},
)
