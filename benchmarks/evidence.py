"""The record of what ran on a GPU: parts, tied to the sources they ran on, written after every measurement.

    {"torch_ext_sha256": ..., "parts": {"correctness": {<environment>, "tests": {node id: {outcome, seconds}}},
                                        "sanitize": {<environment>, "runs": {name: {...}}},
                                        "fuzz": {<environment>, examples, seeds, launches, failures},
                                        "bench": {<environment>, "rows": {name: {...}}}}}

Parts of other sources are dropped, never merged. A part that is started again starts empty.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path

from benchmarks.kernel import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu-evidence.json"


class Evidence:
    def __init__(self, path: Path, sha256: str):
        """Open the record at `path` for sources of this hash; what other sources left there is dropped."""
        self.path, self.data = Path(path), {"torch_ext_sha256": sha256, "parts": {}}
        if self.path.exists():
            found = json.loads(self.path.read_text())
            if found.get("torch_ext_sha256") == sha256:
                self.data = found

    def begin(self, part: str, **environment) -> None:
        self.data["parts"][part] = environment
        self.write()

    def add(self, part: str, kind: str, name: str, entry: dict) -> None:
        """Set parts[part][kind][name], on disk before this returns."""
        self.data["parts"][part].setdefault(kind, {})[name] = entry
        self.write()

    def set(self, part: str, **values) -> None:
        self.data["parts"][part].update(values)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.data, indent=1, allow_nan=True) + "\n")
        os.replace(fresh, self.path)


def environment(cce) -> dict:
    """Device, versions, date and the id under which the kernel was loaded."""
    import torch
    import triton

    device = driver = memory = None
    if torch.cuda.is_available():
        device, driver = torch.cuda.get_device_name(), driver_version()
        memory = torch.cuda.get_device_properties(0).total_memory
    return {
        "device": device,
        "memory_bytes": memory,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "module": cce.__name__,
    }


def driver_version() -> str | None:
    """The NVIDIA driver's version, from the kernel module or from nvidia-smi."""
    import subprocess

    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
