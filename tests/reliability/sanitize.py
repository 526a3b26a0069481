"""The native test-suite on an extension built with AddressSanitizer and UndefinedBehaviorSanitizer.

`python -m tests.reliability.sanitize` builds it into build/sanitize, sees that the sanitizer catches an overflow made
on purpose, and runs the tests once for every instruction set that the processor has. Scratch memory of this build is
filled with NaN before a kernel gets it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from geoflow_fast.ops import extension

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build" / "sanitize" / "lib"
SUITE = (
    "ops/test_border.py",
    "ops/test_native_fuzz.py",
    "reliability/test_widths.py",
    "ops/test_masked_interpolant.py",
    "ops/test_gallery_posterior.py",
    "ops/test_gallery_bfloat16.py",
    "ops/test_gallery_search.py",
    "ops/test_network_cpu.py",
    "ops/test_network_ops.py",
    "ops/test_segments.py",
    "ops/test_tangent_step.py",
    "flow/test_inference.py",
    "flow/test_sampling.py",
    "ops/test_ot.py",
    "ops/test_ot_bfloat16.py",
)
OVERFLOW = """
import numpy as np, torch
from geoflow_fast.ops import extension
memory = np.zeros(64, np.float32)
rows = torch.from_numpy(np.lib.stride_tricks.as_strided(memory, (24, 4), (16, 4)))  # 96 numbers
extension.loaded().adaln(rows, torch.zeros(1, 4), torch.zeros(1, 4), 1e-6)
print("not seen")
"""


def build() -> None:
    """The package with the sanitized extension, apart from the one that is installed."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(LIBRARY.parent), "--build-lib"]
    environment = {**os.environ, "GEOFLOW_SANITIZE": "1", "GEOFLOW_CUDA": "0"}
    subprocess.run([*command, str(LIBRARY)], cwd=ROOT, env=environment, check=True)


def surroundings(**changes: str) -> dict[str, str]:
    """An environment in which Python, which is not built with the sanitizer, can load such an extension."""
    runtimes = [
        subprocess.check_output(["gcc", f"-print-file-name={name}.so"], text=True) for name in ("libasan", "libubsan")
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(path.strip() for path in runtimes),
        "PYTHONPATH": str(LIBRARY),
        # Python itself never frees some of what it allocates.
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        **changes,
    }


def sees_an_overflow() -> bool:
    """Whether a kernel that is told of more memory than there is ends with the sanitizer's report."""
    result = subprocess.run(
        [sys.executable, "-c", OVERFLOW], capture_output=True, text=True, env=surroundings(), cwd="/"
    )
    return result.returncode == 66 and "heap-buffer-overflow" in result.stderr


def run_suite(isa: str) -> None:
    """Runs the tests and exits if one fails or the sanitizer ends the run."""
    options = ["-q", "-p", "no:cacheprovider", "-o", f"pythonpath={LIBRARY} .", "-m", "not slow and not gpu"]
    # The sanitizer keeps freed memory for a while, so the one test that weighs a process cannot hold under it.
    options += ["--deselect", "tests/ops/test_ot.py::test_memory_is_one_matrix"]
    files = [str(ROOT / "tests" / name) for name in SUITE]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = surroundings(GEOFLOW_ISA=isa)
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if status != 0:
        raise SystemExit(f"the sanitized test-suite ended with status {status}")


def main() -> None:
    build()
    if not sees_an_overflow():
        raise SystemExit("the sanitizer does not see an overflow made on purpose: a run with it would prove nothing")
    for isa in extension.supported_isas():
        run_suite(isa)


if __name__ == "__main__":
    main()
