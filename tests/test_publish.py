"""Publishing to a Hub on the loopback interface: what lands where, what is refused, what failures leave behind."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from hub import Fault, Hub
from hub.checkout import append, checkout, commit, set_version
from huggingface_hub import HfApi, constants

import tools.publish
from tools.hub import KernelRepo, PublishError
from tools.publish import publish, roll_back
from tools.source_hash import ROOT
from tools.verify import find_variants, verify

REPO = "org/cut-cross-entropy"
VARIANTS = [f"torch-{backend}" for backend in ("cuda", "rocm", "xpu", "metal", "cpu")]


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture
def repo(hub):
    return KernelRepo(REPO, HfApi(endpoint=hub.url, token="hf_test"))


@pytest.fixture
def untested(monkeypatch):
    """Publish without the fast tests, which have a test of their own."""
    monkeypatch.setattr(tools.publish, "run_fast_tests", lambda root, built: None)


@pytest.fixture
def work(tmp_path):
    return checkout(tmp_path / "work")


def files(hub, branch):
    stored = hub.repos[REPO]
    return stored.commits[stored.branches[branch]]


def commits(hub, branch):
    return [sha for name, sha in hub.repos[REPO].log if name == branch]


def test_first_release(hub, repo, work, capsys):
    assert publish(work, repo, dry_run=True)
    assert not hub.repos and "dry run" in capsys.readouterr().out
    assert publish(work, repo)
    assert "1 passed" in capsys.readouterr().out

    released, main = files(hub, "v1"), files(hub, "main")
    assert {path.split("/")[1] for path in released if path.startswith("build/")} == set(VARIANTS)
    sources = {path.name for path in (work / "torch-ext" / "cut_cross_entropy").glob("*.py")}
    for variant in VARIANTS:
        assert sources | {"metadata.json", "_ops.py"} <= {p.split("/")[2] for p in released if f"/{variant}/" in p}
    outside = {path for path in released if not path.startswith("build/")}
    assert outside == {".gitattributes", "benchmarks/benchmark.py"}
    assert {"README.md", "build.toml", "tests/test_packaging.py", "torch-ext/cut_cross_entropy/ops.py"} <= set(main)
    assert not {path for path in main if path.startswith("build/")} and "cut_cross_entropy" not in main
    assert len(commits(hub, "v1")) == 1

    before = dict(hub.repos[REPO].branches)
    assert not publish(work, repo)
    assert hub.repos[REPO].branches == before and "already holds this release" in capsys.readouterr().out


def test_card(hub, repo, work, untested):
    publish(work, repo)
    card = files(hub, "main")["README.md"].decode()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert f'get_kernel("{REPO}", version=1, trust_remote_code=["{REPO}"])' in card
    for line in ("- `linear_cross_entropy`", "- `LinearCrossEntropy`", "| peak | 1 GiB |", "kernels benchmark"):
        assert line in card
    for absent in ("{%", "{{", "project's own", "<!--", "figure.png", "Limits"):
        assert absent not in card


def test_command(hub, tmp_path):
    work = checkout(tmp_path / "work", tools=True)
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "HF_HOME": str(tmp_path / "home")}
    env.pop("HF_HUB_OFFLINE", None)
    env["PYTHONPATH"] = str(work)

    def command(*arguments):
        line = [sys.executable, "-m", "tools.publish", REPO, *arguments]
        return subprocess.run(line, cwd=work, env=env, capture_output=True, text=True)

    done = command()
    assert done.returncode == 0, done.stderr
    assert f'get_kernel("{REPO}", version=1)' in done.stdout and set(hub.repos[REPO].branches) == {"main", "v1"}
    (work / "stray.txt").write_text("")
    refused = command("--dry-run")
    assert refused.returncode == 1 and "1 uncommitted change(s) (stray.txt)" in refused.stderr


def test_refuses_failing_tests(hub, repo, work):
    (work / "tests" / "test_packaging.py").write_text("def test_artefact():\n    assert False, 'broken artefact'\n")
    commit(work)
    with pytest.raises(PublishError, match="(?s)fast tests fail.*broken artefact"):
        publish(work, repo)
    assert not hub.repos


def test_refuses_to_break_callers(hub, repo, work, untested):
    publish(work, repo)
    source = work / "torch-ext" / "cut_cross_entropy" / "functional.py"
    source.write_text(source.read_text().replace('reduction="mean"', 'reduction="sum"'))
    commit(work)
    with pytest.raises(PublishError, match="linear_cross_entropy: the default of reduction was 'mean', is 'sum'"):
        publish(work, repo)
    assert len(commits(hub, "v1")) == 1
    assert publish(set_version(work, 2), repo)
    assert set(hub.repos[REPO].branches) == {"main", "v1", "v2"}


def test_refuses_a_version_with_the_sources_of_another(repo, work, untested):
    publish(work, repo)
    with pytest.raises(PublishError, match="version 2 has the sources of version 1"):
        publish(set_version(work, 2), repo)


def test_refuses_an_id_of_other_content(hub, repo, work, untested):
    publish(work, repo)
    metadata = "build/torch-cpu/metadata.json"
    files(hub, "v1")[metadata] = files(hub, "v1")[metadata].replace(b'"__init__.py": "', b'"__init__.py": "A')
    with pytest.raises(PublishError, match="_cpu_.* is already used by other content, build/torch-cpu/metadata.json"):
        publish(work, repo)


def test_an_update_removes_what_is_stale_and_keeps_what_others_built(hub, repo, work, untested):
    publish(work, repo)
    files(hub, "v1")["build/torch-cpu/gone.py"] = b""
    files(hub, "v1")["build/torch29-cxx11-cu128-x86_64-linux/metadata.json"] = files(hub, "v1")[
        "build/torch-cuda/metadata.json"
    ].replace(b"_cuda_", b"_signed_")
    files(hub, "v1")["benchmarks/benchmark_old.py"] = b""
    files(hub, "main")["tests/test_gone.py"] = b""
    assert publish(append(work, "__init__.py", "FIX = 1"), repo)
    released = files(hub, "v1")
    assert "build/torch-cpu/gone.py" not in released and "benchmarks/benchmark_old.py" not in released
    assert "build/torch29-cxx11-cu128-x86_64-linux/metadata.json" in released
    assert "tests/test_gone.py" not in files(hub, "main")
    assert b"FIX = 1" in released["build/torch-rocm/__init__.py"]


def test_a_new_version_starts_empty_and_main_follows_the_newest(hub, repo, work, untested):
    publish(work, repo)
    files(hub, "main")["build/torch-cpu/inherited.py"] = b""
    publish(append(set_version(work, 2), "__init__.py", "TWO = 2"), repo)
    assert not [path for path in files(hub, "v2") if "inherited" in path or path.startswith(("torch-ext/", "tests/"))]
    newest = hub.repos[REPO].branches["main"]
    (work / "build.toml").write_text((work / "build.toml").read_text().replace("version = 2", "version = 1"))
    publish(append(work, "__init__.py", "FIX = 1"), repo)
    assert b"FIX = 1" in files(hub, "v1")["build/torch-cpu/__init__.py"]
    assert hub.repos[REPO].branches["main"] == newest


WRITES = ["repos/create", "preupload/main", "commit/main", "branch/v1", "preupload/v1", "commit/v1"]


@pytest.mark.parametrize("action", [429, 500, "drop", "lose"])
def test_passing_failures_are_repeated(hub, repo, work, untested, action):
    calls = [*WRITES, "kernels/.*/refs", "kernels/.*/tree"]
    hub.faults = [Fault(call, action, headers={"Retry-After": "3"}) for call in calls]
    assert publish(work, repo)
    assert not any(fault.times for fault in hub.faults)
    assert (len(commits(hub, "main")), len(commits(hub, "v1"))) == (2, 1)  # the Hub makes main's first commit
    assert not publish(work, repo)


def test_lasting_failure_leaves_the_old_release(hub, repo, work, untested):
    publish(work, repo)
    before = hub.repos[REPO].branches["v1"]
    hub.faults = [Fault("commit/v1", 503, times=99)]
    append(work, "__init__.py", "FIX = 1")
    with pytest.raises(PublishError, match="did not answer in 5 attempts.*503"):
        publish(work, repo)
    assert hub.repos[REPO].branches["v1"] == before
    hub.faults = []
    assert publish(work, repo) and b"FIX = 1" in files(hub, "v1")["build/torch-cpu/__init__.py"]


@pytest.mark.parametrize("action", ["drop", "lose"], ids=["before", "after"])
@pytest.mark.parametrize("call", ["repos/create", "commit/main", "branch/v1", "commit/v1"])
def test_killed_publisher(hub, repo, work, untested, call, action):
    """Killed before or after a request is carried out: no branch holds half a release, a second run completes it."""
    publisher = multiprocessing.get_context("fork").Process(target=publish, args=(work, repo))

    def kill():
        os.kill(publisher.pid, signal.SIGKILL)
        return action

    hub.faults = [Fault(call, kill)]
    publisher.start()
    publisher.join(60)
    assert publisher.exitcode == -signal.SIGKILL
    if REPO in hub.repos and "v1" in hub.repos[REPO].branches:
        assert len([path for path in files(hub, "v1") if path.endswith("metadata.json")]) in (0, len(VARIANTS))
    publish(work, repo)
    assert len(commits(hub, "v1")) == 1
    assert not publish(work, repo)


def test_two_publishers_at_once(hub, repo, tmp_path, untested):
    """The slower one, about to commit on a head that has moved, overwrites nothing and is told why."""
    publish(checkout(tmp_path / "first"), repo)
    fast = append(checkout(tmp_path / "fast"), "__init__.py", "WINNER = 1")
    slow = append(checkout(tmp_path / "slow"), "__init__.py", "WINNER = 2")
    hub.faults = [Fault("commit/main", lambda: publish(fast, repo) and None)]
    with pytest.raises(PublishError, match="branch main of org/cut-cross-entropy moved from .* another publisher"):
        publish(slow, repo)
    assert b"WINNER = 1" in files(hub, "v1")["build/torch-cpu/__init__.py"]
    assert len(commits(hub, "v1")) == 2


def test_two_publishers_of_an_older_version(hub, repo, tmp_path, untested):
    """The same race where only the version's branch is written."""
    publish(checkout(tmp_path / "first"), repo)
    publish(append(set_version(checkout(tmp_path / "newer"), 2), "__init__.py", "TWO = 2"), repo)
    fast = append(checkout(tmp_path / "fast"), "__init__.py", "WINNER = 1")
    slow = append(checkout(tmp_path / "slow"), "__init__.py", "WINNER = 2")
    hub.faults = [Fault("commit/v1", lambda: publish(fast, repo) and None)]
    with pytest.raises(PublishError, match="branch v1 of org/cut-cross-entropy moved from .* another publisher"):
        publish(slow, repo)
    assert b"WINNER = 1" in files(hub, "v1")["build/torch-cpu/__init__.py"]


def test_roll_back(hub, repo, work, untested):
    publish(work, repo)
    good, main = hub.repos[REPO].branches["v1"], hub.repos[REPO].branches["main"]
    original = dict(files(hub, "v1"))
    publish(append(work, "layers.py", "BAD = 1"), repo)
    main = hub.repos[REPO].branches["main"]
    assert roll_back(repo, good, dry_run=True) and files(hub, "v1") != original
    assert roll_back(repo, good)
    assert files(hub, "v1") == original
    assert hub.repos[REPO].branches["v1"] != good and hub.repos[REPO].branches["main"] == main
    assert not roll_back(repo, good)
    with pytest.raises(PublishError, match="holds no release of one version"):
        roll_back(repo, main)
    assert publish(append(work, "layers.py", "GOOD = 1"), repo)


def test_roll_back_refuses_damage(hub, repo, work, untested):
    publish(work, repo)
    bad = hub.repos[REPO].branches["v1"]
    files(hub, "v1")["build/torch-xpu/ops.py"] += b"#"
    publish(append(work, "__init__.py", "FIX = 1"), repo)
    with pytest.raises(PublishError, match="build/torch-xpu at .* is damaged: .*ops.py"):
        roll_back(repo, bad)


def test_verify_names_the_file(built, tmp_path):
    variants = find_variants(built)
    assert [folder.name for folder in variants] == sorted(VARIANTS)
    assert not any(verify(folder) for folder in variants)
    copy = tmp_path / "torch-cpu"
    shutil.copytree(built / "build" / "torch-cpu", copy)
    (copy / "ops.py").write_text("changed")
    (copy / "backends" / "torch.py").unlink()
    (copy / "stray.py").write_text("")
    found = verify(copy)
    assert len(found) == 3 and all(any(name in line for line in found) for name in ("ops.py", "torch.py", "stray.py"))
    run = subprocess.run([sys.executable, "-m", "tools.verify", copy], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "DIFFERS" in run.stdout and "ops.py" in run.stdout
    with pytest.raises(FileNotFoundError, match="no kernel variant"):
        find_variants(tmp_path / "nowhere")
