"""The built kernel meets the rules of the Hub's loader and builder, on machines with and without Triton."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel
from kernels._rust import Build, Digest, Metadata

from tools.build import build
from tools.source_hash import ROOT, source_files, torch_ext_sha256

PACKAGE = ROOT / "torch-ext" / "cut_cross_entropy"
BACKENDS = ["cuda", "rocm", "xpu", "metal", "cpu"]


def sources():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_ops.py"]


def uid(variant):
    """The hash of the sources that the variant ships, as its id must carry it."""
    digest = hashlib.sha256()
    for path in source_files(variant):
        if path.name != "metadata.json":
            name = f"cut_cross_entropy/{path.relative_to(variant).as_posix()}"
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:7]


def fork(folder, marker):
    """A checkout whose kernel differs from the present one by `marker`."""
    shutil.copytree(ROOT / "torch-ext", folder / "torch-ext", ignore=shutil.ignore_patterns("__pycache__", "_ops.py"))
    shutil.copyfile(ROOT / "build.toml", folder / "build.toml")
    with (folder / "torch-ext" / "cut_cross_entropy" / "__init__.py").open("a") as init:
        init.write(f"\nMARKER = {marker!r}\n")
    build(folder)
    return folder


def tiny(dtype=torch.float32):
    e = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()
    c = torch.randn(11, 8, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()
    return e, c, torch.tensor([0, 3, 10, -100, 7, 7])


def assert_works(kernel):
    e, c, targets = tiny()
    loss = kernel.linear_cross_entropy(e, c, targets)
    loss.backward()
    want = torch.nn.functional.cross_entropy(e.double() @ c.double().T, targets)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    assert e.grad.isfinite().all() and c.grad.isfinite().all() and e.grad.any() and c.grad.any()


def test_build_configuration_is_valid():
    assert [str(backend) for backend in Build.open(ROOT).general.backends] == BACKENDS
    assert not (PACKAGE / "cut_cross_entropy").exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_variant_metadata(built, backend):
    folder = built / "build" / f"torch-{backend}"
    metadata = Metadata.read_from_file(folder / "metadata.json")
    assert metadata.id == f"_cut_cross_entropy_{backend}_{uid(folder)}"
    assert (str(metadata.name), metadata.version, metadata.license) == ("cut-cross-entropy", 1, "Apache-2.0")
    assert str(metadata.backend.backend_type) == backend
    assert metadata.python_depends == [] and metadata.kernel_depends == []
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))
    shipped = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    caches = {name for name in shipped if "__pycache__" in name}
    assert shipped - caches - {"metadata.json"} == set(metadata.digest.files)
    assert f'"{metadata.id}"' in (folder / "_ops.py").read_text()


def test_variants_ship_the_same_sources(built):
    files = [
        Metadata.read_from_file(built / "build" / f"torch-{backend}" / "metadata.json").digest.files
        for backend in BACKENDS
    ]
    plain = [{name: value for name, value in digest.items() if name != "_ops.py"} for digest in files]
    assert all(digest == plain[0] for digest in plain)
    assert set(plain[0]) == {path.relative_to(PACKAGE).as_posix() for path in sources()}
    assert len({digest["_ops.py"] for digest in files}) == len(BACKENDS)


def test_build_is_idempotent_and_mends(tmp_path):
    first = {path: path.stat().st_ino for path in build(out=tmp_path)}
    assert {path: path.stat().st_ino for path in build(out=tmp_path)} == first
    (tmp_path / "torch-cpu" / "__init__.py").write_text("tampered")
    (tmp_path / "torch-cuda" / "stray.py").write_text("")
    (tmp_path / "torch-tpu").mkdir()
    build(out=tmp_path)
    for path in first:
        digest = Metadata.read_from_file(path / "metadata.json").digest
        digest.validate(Digest.hash_variant(digest.algorithm, path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"torch-{backend}" for backend in BACKENDS)


def test_source_hash_definition(tmp_path):
    package = tmp_path / "torch-ext" / "kernel"
    (package / "__pycache__").mkdir(parents=True)
    (package / "b").mkdir()
    for name in ("b/x.py", "b.py", "_ops.py", "__pycache__/b.cpython-311.pyc"):
        (package / name).write_text(name)
    want = hashlib.sha256(b"kernel/b.py\0b.py\0kernel/b/x.py\0b/x.py\0").hexdigest()
    assert torch_ext_sha256(tmp_path) == want


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_are_relative_standard_torch_or_triton(path):
    allowed = set(sys.stdlib_module_names) | {"torch", "triton"}
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in allowed, f"{path.name}:{node.lineno} imports {name}"


def test_all_is_a_literal_list(cce):
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == ["__all__"]
    ]
    assert len(values) == 1 and isinstance(values[0], ast.List)
    names = ast.literal_eval(values[0])
    assert names == cce.__all__ and len(set(names)) == len(names)
    assert all(hasattr(cce, name) for name in names)


def test_custom_ops_are_registered_as_the_builder_accepts():
    registered = 0
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for call in (item for item in node.decorator_list if isinstance(item, ast.Call)):
                name = ast.unparse(call.func)
                assert not name.endswith("register_kernel"), f"{path.name}:{call.lineno}"
                if name.endswith("custom_op"):
                    registered += 1
                    assert name == "torch.library.custom_op", f"{path.name}:{call.lineno} writes {name}"
                    prefix = call.args[0]
                    assert isinstance(prefix, ast.Call) and ast.unparse(prefix.func) == "add_op_namespace_prefix"
                    assert isinstance(prefix.args[0], ast.Constant)
    assert registered


def test_layers_are_stateless(cce):
    layers = [item for item in vars(cce.layers).values() if isinstance(item, type) and item.__module__.startswith("_")]
    modules = [item for item in layers if issubclass(item, torch.nn.Module)]
    assert modules
    for module in modules:
        assert "__init__" not in vars(module)
        assert module.has_backward is True and module.can_torch_compile is True


def test_get_kernel_loads_the_build(cce, built):
    variant = Path(cce.__file__).parent
    assert variant.parent == built / "build"
    assert cce.__name__ == f"_cut_cross_entropy_{variant.name.removeprefix('torch-')}_{uid(variant)}"
    assert_works(cce)


@pytest.mark.parametrize("where", [".", "build", "build/torch-cpu"])
def test_get_local_kernel(cce, built, where):
    kernel = get_local_kernel(built / where, backend="cpu")
    assert kernel.__name__.startswith("_cut_cross_entropy_cpu_")
    assert_works(kernel)


IMPORT = """
import os, sys
{before}
import torch
from kernels import get_kernel

kernel = get_kernel({repo!r}, version=1, trust_remote_code=[{repo!r}])
assert not torch.cuda.is_initialized(), "importing the kernel woke a device"
plain = [name for name in sys.modules if name.split(".")[0] == "cut_cross_entropy"]
assert not plain, plain
e = torch.ones(3, 4, requires_grad=True)
kernel.linear_cross_entropy(e, torch.eye(5, 4), torch.tensor([0, 1, 4])).backward()
assert e.grad.isfinite().all() and e.grad.any()
print(kernel.__name__)
"""


@pytest.mark.parametrize(
    "before",
    ["", "sys.modules['triton'] = None"],
    ids=["plain", "without-triton"],
)
def test_import_needs_neither_device_nor_triton(built, repo, before):
    env = {**os.environ, "LOCAL_KERNELS": f"{repo}={built}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    script = IMPORT.format(before=before, repo=repo)
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("_cut_cross_entropy_")


def test_two_versions_in_one_process(tmp_path):
    one = get_local_kernel(fork(tmp_path / "one", 1), backend="cpu")
    two = get_local_kernel(fork(tmp_path / "two", 2), backend="cpu")
    assert one.__name__ != two.__name__ and (one.MARKER, two.MARKER) == (1, 2)
    assert one.linear_cross_entropy.__module__.startswith(one.__name__)
    for kernel in (one, two, one):
        assert_works(kernel)
    ids = [json.loads((tmp_path / name / "build/torch-cpu/metadata.json").read_text())["id"] for name in ("one", "two")]
    assert ids == [one.__name__, two.__name__]
