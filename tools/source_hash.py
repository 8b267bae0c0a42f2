"""sha256 of the sources that ship, the identity behind a build's uid and the GPU evidence.

The hash runs over every file of torch-ext/ in sorted posix order of its path relative to torch-ext/,
each as path, NUL, content, NUL. Generated `_ops.py` and caches are no sources.
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".ipynb_checkpoints"}


def source_files(folder: Path) -> Iterator[Path]:
    """The shipped files below `folder`, in sorted posix order of their relative paths."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    for name in sorted(files):
        path = files[name]
        if path.name != "_ops.py" and path.suffix not in (".pyc", ".pyo") and CACHES.isdisjoint(Path(name).parts):
            yield path


def torch_ext_sha256(root: Path | str = ROOT) -> str:
    """Hex sha256 of the sources under `root`/torch-ext."""
    folder = Path(root) / "torch-ext"
    digest = hashlib.sha256()
    for path in source_files(folder):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":
    print(torch_ext_sha256(*sys.argv[1:2]))
