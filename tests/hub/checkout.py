"""Small git checkouts of the kernel, to publish releases that differ."""

import shutil
import subprocess
from pathlib import Path

from tools.source_hash import ROOT

# In place of the project's own: seconds matter here, and what the publisher does with the outcome is what is tested.
FAST_TEST = """
import os
from pathlib import Path

def test_artefact():
    assert len(list(Path(os.environ["CCE_BUILT"], "build").glob("torch-*/metadata.json"))) == 5
"""

README = """# The project's own

## Measured

![Figure](figure.png)

<!-- measured:shapes -->
| peak | 1 GiB |
<!-- /measured -->

## Limits
"""


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Publisher", "-c", "user.email=publisher@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> Path:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Change")
    return folder


def append(folder: Path, module: str, text: str) -> Path:
    """Add `text` to a module of the kernel in the checkout, and commit."""
    with (folder / "torch-ext" / "cut_cross_entropy" / module).open("a") as source:
        source.write(f"\n{text}\n")
    return commit(folder)


def set_version(folder: Path, version: int) -> Path:
    config = folder / "build.toml"
    config.write_text(config.read_text().replace("version = 1\n", f"version = {version}\n"))
    return commit(folder)


def checkout(folder: Path, tools: bool = False) -> Path:
    """A clean git checkout in `folder` with the present kernel; with `tools`, the publisher too."""
    generated = shutil.ignore_patterns("__pycache__", "_ops.py")
    for name in ("torch-ext", "tools") if tools else ("torch-ext",):
        shutil.copytree(ROOT / name, folder / name, ignore=generated)
    for name in ("build.toml", "CARD.md", "CHANGELOG.md", "LICENSE", "flake.nix", ".gitignore"):
        shutil.copyfile(ROOT / name, folder / name)
    for name, text in {
        "tests/test_packaging.py": FAST_TEST,
        "benchmarks/benchmark.py": "WORKLOADS = 0\n",
        "benchmarks/peers.py": "PEERS = 0\n",
        "README.md": README,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "cut_cross_entropy").symlink_to("torch-ext/cut_cross_entropy")
    git(folder, "init", "-q", "-b", "main")
    return commit(folder)
