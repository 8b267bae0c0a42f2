"""What users of a published kernel do: load, trust, pin, lock, download, work offline, replace a layer."""

import time

import pytest
from hub import Fault, Hub
from hub.checkout import append, checkout, set_version
from hub.user import user
from huggingface_hub import HfApi, constants

import tools.publish
from tools.hub import KernelRepo
from tools.publish import publish
from tools.source_hash import ROOT
from tools.verify import verify

REPO = "org/cut-cross-entropy"
TRUSTED = "trusted/cut-cross-entropy"
LOAD = f'get_kernel("{REPO}", version=1, trust_remote_code=["{REPO}"])'
# Version 2 has another interface and another result, so that a mix-up shows.
VERSION_2 = """
_linear_cross_entropy = linear_cross_entropy


def linear_cross_entropy(e, c, targets):
    return 2 * _linear_cross_entropy(e, c, targets)
"""


@pytest.fixture(scope="module")
def publisher():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(time, "sleep", lambda seconds: None)
        patch.setattr(tools.publish, "run_fast_tests", lambda root, built: None)

        def release(hub, work, repo_id=REPO):
            publish(work, KernelRepo(repo_id, HfApi(endpoint=hub.url, token="hf_test")))
            return hub.repos[repo_id].branches

        yield release


@pytest.fixture(scope="module")
def market(publisher, tmp_path_factory):
    """A Hub with version 1 from a trusted and from another organization, and version 2 from the other."""
    work = checkout(tmp_path_factory.mktemp("market") / "work")
    with Hub(trusted=("trusted",)) as hub:
        publisher(hub, work, REPO)
        publisher(hub, work, TRUSTED)
        publisher(hub, append(set_version(work, 2), "functional.py", VERSION_2), REPO)
        yield hub


def test_trust(market, tmp_path):
    answer = user(
        market.url,
        tmp_path,
        f"""
answer["untrusted"] = refused(lambda: get_kernel("{REPO}", version=1))
answer["missing"] = refused(lambda: get_kernel("{REPO}", version=3, trust_remote_code=["{REPO}"]))
answer["neither"] = refused(lambda: get_kernel("{REPO}", trust_remote_code=["{REPO}"]))
kernel = {LOAD}
answer["listed"], answer["file"] = step(kernel), kernel.__file__
answer["trusted"] = step(get_kernel("{TRUSTED}", version=1))
""",
    )
    assert "is not from a trusted publisher" in answer["untrusted"]
    assert "Version 3 not found, available versions: 1, 2" in answer["missing"]
    assert "version or revision must be specified" in answer["neither"]
    assert answer["listed"] == answer["trusted"] == pytest.approx(1, abs=1e-5)
    assert answer["file"].startswith(str(tmp_path))
    assert verify(answer["file"].removesuffix("/__init__.py")) == []
    assert "version 2 is available" in answer["log"]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=str)
def test_two_versions_in_one_process(market, tmp_path, order):
    """Each runs its own code and its own operators, eagerly and compiled, whichever came first."""
    answer = user(
        market.url,
        tmp_path,
        f"""
from torch.utils._python_dispatch import TorchDispatchMode

class Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.namespace.startswith("_cut_cross_entropy"):
            used.add(function.namespace)
        return function(*arguments, **(named or {{}}))

class Compiled:
    def __init__(self, kernel):
        self.linear_cross_entropy = torch.compile(kernel.linear_cross_entropy, backend="aot_eager", fullgraph=True)

kernels = {{n: get_kernel("{REPO}", version=n, trust_remote_code=["{REPO}"]) for n in {order}}}
for n, kernel in [*kernels.items(), *kernels.items()]:
    used = set()
    with Recorder():
        assert abs(step(kernel, reference=n == 1) - n) < 1e-5
    assert used == {{kernel.__name__}}, used
for n, kernel in kernels.items():
    assert abs(step(Compiled(kernel), reference=n == 1) - n) < 1e-5
answer["ids"] = sorted({{kernel.__name__ for kernel in kernels.values()}})
""",
    )
    assert len(answer["ids"]) == 2


COMMANDS = """
import contextlib, io
from pathlib import Path
from kernels import get_locked_kernel
from kernels.cli import main

def command(*arguments):
    sys.argv = ["kernels", *map(str, arguments)]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main()
    return shown.getvalue()

project = Path({project!r})
"""


def test_patch_lock_and_pin(publisher, tmp_path):
    """A fix on v1 reaches who follows version 1, and nobody who pinned a commit or locked a project."""
    work, project, home = checkout(tmp_path / "work"), tmp_path / "project", tmp_path / "home"
    project.mkdir()
    (project / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{TRUSTED}" = 1\n')
    commands = COMMANDS.format(project=str(project))
    with Hub(trusted=("trusted",)) as hub:
        first = publisher(hub, work, TRUSTED)["v1"]
        answer = user(
            hub.url,
            home,
            commands
            + f"""
command("lock", project)
answer["fixed"] = hasattr(get_kernel("{TRUSTED}", version=1), "FIX")
""",
        )
        assert not answer["fixed"] and first in (project / "kernels.lock").read_text()

        second = publisher(hub, append(work, "__init__.py", "FIX = 1"), TRUSTED)["v1"]
        assert second != first
        answer = user(
            hub.url,
            home,
            commands
            + f"""
answer["follows"] = hasattr(get_kernel("{TRUSTED}", version=1), "FIX")
answer["pinned"] = hasattr(get_kernel("{TRUSTED}", revision="{first}"), "FIX")
command("download", project)
locked = get_locked_kernel("{TRUSTED}", lockfile=project / "kernels.lock")
answer["locked"] = hasattr(locked, "FIX")
answer["works"] = step(locked)
answer["versions"] = command("versions", "{TRUSTED}")
answer["info"] = json.loads(command("info", "{TRUSTED}", "--version", "1", "--json"))
""",
        )
    assert (answer["follows"], answer["pinned"], answer["locked"]) == (True, False, False)
    assert answer["works"] == pytest.approx(1, abs=1e-5)
    assert "Version 1:" in answer["versions"] and "compatible, preferred" in answer["versions"]
    info = answer["info"]
    assert (info["name"], info["version"], info["license"]) == ("cut-cross-entropy", 1, "Apache-2.0")
    assert info["backends"] == ["cpu", "cuda", "metal", "rocm", "xpu"]


def test_offline(market, publisher, tmp_path):
    """Without a Hub: from a full snapshot made before. LOCAL_KERNELS, the other way, carries the rest of the tests."""
    api = HfApi(endpoint=market.url)
    api.snapshot_download(REPO, repo_type="kernel", revision="v1", cache_dir=tmp_path / "hub")
    answer = user("http://127.0.0.1:9", tmp_path, f"answer['loss'] = step({LOAD})", HF_HUB_OFFLINE="1")
    assert answer["loss"] == pytest.approx(1, abs=1e-5)


def test_failures_while_loading(market, tmp_path):
    """What fails while a kernel comes down is resumed or a clear error; what loads in the end is whole."""
    market.faults = [
        Fault("GET .*/resolve/.*/planner.py", 503),
        Fault("GET .*/resolve/.*/ops.py", 429, headers={"Retry-After": "0"}),
        Fault("GET .*/resolve/.*/functional.py", "cut"),
        Fault("GET .*/resolve/.*/layers.py", "drop"),
    ]
    answer = user(
        market.url,
        tmp_path,
        f"""
answer["first"] = refused(lambda: {LOAD})
kernel = {LOAD}
answer["file"], answer["loss"] = kernel.__file__, step(kernel)
""",
    )
    assert not any(fault.times for fault in market.faults)
    market.faults = []
    assert "503 Service Unavailable" in answer["first"]
    assert answer["loss"] == pytest.approx(1, abs=1e-5)
    assert verify(answer["file"].removesuffix("/__init__.py")) == []


def test_layer_of_a_published_kernel(market, tmp_path):
    """`kernelize` puts the published layer in place of a model's own loss module."""
    answer = user(
        market.url,
        tmp_path,
        f"""
from torch import nn
from kernels import LayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping

@use_kernel_forward_from_hub("LinearCrossEntropy")
class Loss(nn.Module):
    def forward(self, e, c, targets, bias=None, **options):
        calls.append("materialized")
        return nn.functional.cross_entropy(nn.functional.linear(e, c, bias), targets)

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.loss = nn.Parameter(torch.randn(13, 8)), Loss()

    def forward(self, hidden, targets):
        return self.loss(hidden, self.weight, targets)

torch.manual_seed(0)
calls, head, hidden, targets = [], Head(), torch.randn(7, 8), torch.arange(7)
want = torch.autograd.grad(head(hidden, targets), head.weight)[0]
layer = LayerRepository("{REPO}", layer_name="LinearCrossEntropy", version=1, trust_remote_code=["{REPO}"])
with use_kernel_mapping({{"LinearCrossEntropy": {{"cpu": layer}}}}):
    head = kernelize(head, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
got = torch.autograd.grad(head(hidden, targets), head.weight)[0]
torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
answer["calls"] = calls
""",
    )
    assert answer["calls"] == ["materialized"]


def test_kernels_benchmark(built, tmp_path):
    """`kernels benchmark .` in a checkout, as the card says: every workload agrees with its reference."""
    (tmp_path / "build").symlink_to(built / "build")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "benchmark.py").symlink_to(ROOT / "benchmarks" / "benchmark.py")
    answer = user(
        "http://127.0.0.1:9",
        tmp_path / "home",
        COMMANDS.format(project=str(tmp_path))
        + """
command("benchmark", project, "--iterations", "2", "--warmup", "0", "--output", project / "results.json")
answer["results"] = json.loads((project / "results.json").read_text())["results"]
""",
    )
    workloads = {entry["workload"]: entry["verified"] for entry in answer["results"]}
    names = ("forward", "training", "masked_training", "token_stats")
    assert workloads == {f"LinearCrossEntropyBenchmark.{name}": True for name in names}
