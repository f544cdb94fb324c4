"""NVIDIA's compiler: where it is (--find), or fetched from PyPI into this interpreter's environment (--install)."""

import os
import pathlib
import shutil

import tool

# All five, and no newer: the compiler's parts must be of one release, and the SASS must run on drivers of CUDA 13.0.
PACKAGES = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]
ROOT = pathlib.Path(__file__).resolve().parent.parent


def candidates():
    if given := os.environ.get("NVCC"):
        yield given
    if on_path := shutil.which("nvcc"):
        yield on_path
    yield "/usr/local/cuda/bin/nvcc"
    yield from (ROOT / ".venv/lib").glob("python3*/site-packages/nvidia/cu13/bin/nvcc")


def find():
    return next((str(path) for path in candidates() if pathlib.Path(path).is_file()), None)


tool.main(__doc__, find, ["--no-deps", *PACKAGES], "no nvcc: set NVCC, install a CUDA 13 toolkit, or run make kernels")
