"""What counts as breaking the callers of a published version."""

import pytest

from tools.interface import additions, breaking_changes, exported, functions_and_layers, read_interface
from tools.source_hash import ROOT


@pytest.fixture
def interface(tmp_path):
    def read(source, name="package"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text('from .code import f, C\n\n__all__ = ["f", "C"]\n')
        (folder / "code.py").write_text(source)
        return read_interface(folder)

    return read


BASE = "def f(e, c, bias=None, *, scale=1.0): ...\nclass C:\n    size: int\n    def run(self, x): ...\n"
ACCEPTED = {
    "the same": BASE,
    "a new option": BASE.replace("scale=1.0", "scale=1.0, weight=None"),
    "a new optional positional": BASE.replace("bias=None,", "bias=None, extra=0,"),
    "a required one made optional": BASE.replace("c, bias", "c=None, bias"),
    "an option made positional too": BASE.replace("bias=None, *, scale=1.0", "bias=None, scale=1.0"),
    "a new method": BASE + "    def stop(self): ...\n",
    "another body": BASE.replace(
        "def f(e, c, bias=None, *, scale=1.0): ...", "def f(e, c, bias=None, *, scale=1.0): 1"
    ),
    "a private name": BASE + "    def _hidden(self): ...\n",
}
BROKEN = {
    "f: the parameter scale is gone": BASE.replace(", *, scale=1.0", ""),
    "f: the default of scale was 1.0, is 2.0": BASE.replace("scale=1.0", "scale=2.0"),
    "f: the default of scale was 1.0, is required": BASE.replace("scale=1.0", "scale"),
    "f: the positional parameters were (e, c, bias), are (c, e, bias)": BASE.replace("e, c,", "c, e,"),
    "f: the positional parameters were (e, c, bias), are (e, c)": BASE.replace("bias=None, *,", "*, bias=None,"),
    "f: the new parameter extra is required": BASE.replace("scale=1.0", "scale=1.0, extra"),
    "f: the parameter scale is no longer accepted by keyword": BASE.replace(
        "bias=None, *, scale=1.0", "bias=None, scale=1.0, /"
    ),
    "C.size is gone": BASE.replace("    size: int\n", ""),
    "C.run: the positional parameters were (x), are ()": BASE.replace("self, x", "self"),
    "f changed between function and attribute": BASE.replace(
        "def f(e, c, bias=None, *, scale=1.0): ...", "class f: ..."
    ),
}


@pytest.mark.parametrize("source", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(interface, source):
    assert breaking_changes(interface(BASE), interface(source, "new")) == []


@pytest.mark.parametrize(("reason", "source"), BROKEN.items(), ids=BROKEN)
def test_broken(interface, reason, source):
    assert reason in breaking_changes(interface(BASE), interface(source, "new"))


def test_an_export_removed(interface, tmp_path):
    old = interface(BASE)
    (tmp_path / "package" / "__init__.py").write_text('from .code import f\n\n__all__ = ["f"]\n')
    assert breaking_changes(old, read_interface(tmp_path / "package")) == [
        "C is gone",
        "C.size is gone",
        "C.run is gone",
    ]


def test_additions(interface):
    assert additions(interface(BASE), interface(ACCEPTED["a new option"], "new")) == ["f(weight=)"]


def test_reads_this_kernel(cce):
    package = ROOT / "torch-ext" / "cut_cross_entropy"
    found = read_interface(package)
    assert exported(package) == cce.__all__ and set(cce.__all__) <= set(found)
    assert [item.name for item in found["linear_cross_entropy"]][:4] == ["e", "c", "targets", "bias"]
    assert {"Plan.workspace", "TokenStats.entropy", "reference.linear_cross_entropy"} <= set(found)
    functions, layers = functions_and_layers(package)
    assert "linear_cross_entropy" in functions and "layers" not in functions and "LinearCrossEntropy" in layers
