"""A tool that may be on this machine already: where it is (--find), or fetched from PyPI into this interpreter's environment (--install)."""

import argparse
import subprocess
import sys


def main(description, find, packages, missing):
    """`find` gives a path or None; `packages` are pip's arguments; `missing` says what to do without it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--install", action="store_true")
    options = parser.parse_args()
    if options.install and find() is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(pip + packages, check=True)
    if path := find():
        print(path)
        return
    sys.exit(missing)
