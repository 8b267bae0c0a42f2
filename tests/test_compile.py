"""torch.compile, fake tensors and torch.export see one operator each way, whatever the number of tokens."""

import pytest
import torch
import torch._dynamo
from helpers import make_case, outputs_of, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

V, D = 65, 16
SIZES = (128, 129, 2, 1000, 128, 17, 3)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(function, case, **options):
    e, c = case.e.clone().requires_grad_(), case.c.clone().requires_grad_()
    out = [t for t in outputs_of(function(e, c, case.targets, case.bias, **options)).values() if t.is_floating_point()]
    return [t.detach() for t in out] + list(torch.autograd.grad(sum(t.sum() for t in out), (e, c)))


OPTIONS = {
    "plain": {},
    "recompute": {"schedule": "recompute"},
    "single_pass": {"schedule": "single_pass", "softcap": 5.0, "vocab_size": V - 3, "reduction": "sum", "shift": True},
    "single_pass with a penalty": {"schedule": "single_pass", "z_loss": 1e-2, "label_smoothing": 0.1},
    "none": {"reduction": "none", "return_lse": True},
    "all": {
        "reduction": "mean", "softcap": 5.0, "logit_scale": 0.5, "temperature": 0.7, "label_smoothing": 0.1,
        "z_loss": 1e-3, "vocab_size": V - 3, "shift": True, "num_items": 17, "return_lse": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_compiled_is_eager(cce, options, dynamic):
    """fullgraph: no graph break. Many N >= 2: at most two compilations, of the first size and of any size."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(cce.linear_cross_entropy, fullgraph=True, dynamic=dynamic, backend=counter)
    for n in SIZES:
        if n == 2 and "shift" in OPTIONS[options]:
            continue  # one predicted token: torch specialises every graph on a size of 1
        case = make_case(n, V, D, bias=True, vocab_size=OPTIONS[options].get("vocab_size"))
        got = gradients(compiled, case, **OPTIONS[options])
        want = gradients(cce.linear_cross_entropy, case, **OPTIONS[options])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert counter.frame_count <= 2


def test_compiled_statistics(cce):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(cce.linear_token_stats, fullgraph=True, backend=counter)
    for n in SIZES:
        case = make_case(n, V, D, bias=True)
        for a, b in zip(gradients(compiled, case), gradients(cce.linear_token_stats, case), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert counter.frame_count <= 2


def test_compiled_layer(cce):
    """`can_torch_compile` tells the truth."""
    case = make_case(20, V, D)
    layer = torch.compile(cce.layers.LinearCrossEntropy(), fullgraph=True, backend="aot_eager")
    assert torch.equal(layer(case.e, case.c, case.targets), cce.linear_cross_entropy(case.e, case.c, case.targets))


def test_compiled_training_step(cce):
    """Embedding, layer, tied head and loss in one graph, the number of valid tokens as a tensor."""
    embedding, layer = torch.nn.Embedding(V, D), torch.nn.Linear(D, D)
    parameters = [*embedding.parameters(), *layer.parameters()]

    def step(ids, num_items):
        hidden = layer(embedding(ids)).tanh()
        return cce.linear_cross_entropy(hidden, embedding.weight, ids, shift=True, num_items=num_items)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for shape in ((2, 9), (3, 5), (2, 31)):
        ids = torch.randint(V, shape, generator=torch.Generator().manual_seed(shape[1]))
        items = torch.tensor(ids.numel())
        got = torch.autograd.grad(compiled(ids, items), parameters)
        for a, b in zip(got, torch.autograd.grad(step(ids, items), parameters), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_compiled_under_autocast(cce):
    case = make_case(33, V, D)
    compiled = torch.compile(cce.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = gradients(compiled, case), gradients(cce.linear_cross_entropy, case)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b)


def test_inductor(cce):
    """The default backend, whose generated code surrounds the operators: ignored rows exactly 0, NaN in them or not."""
    compiled = torch.compile(cce.linear_cross_entropy, fullgraph=True, dynamic=True)
    for n in (64, 37):
        case = make_case(n, V, D, ignored=0.5)
        ignored = case.targets == -100
        case.e[ignored] = float("nan")
        loss, de, dc = gradients(compiled, case, reduction="none", label_smoothing=0.1)
        assert (loss[ignored] == 0).all() and (de[ignored] == 0).all()
        want = gradients(cce.linear_cross_entropy, case, reduction="none", label_smoothing=0.1)
        for a, b in zip((loss, de, dc), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", ["recompute", "single_pass"])
def test_reduced_overhead(cce, schedule):
    """Where there is no CUDA graph to make, the mode is the default backend."""
    compiled = torch.compile(cce.linear_cross_entropy, fullgraph=True, mode="reduce-overhead")
    for seed in range(3):
        case = make_case(64, V, D, seed=seed)
        got, want = (gradients(run, case, schedule=schedule) for run in (compiled, cce.linear_cross_entropy))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", ["recompute", "single_pass"])
def test_operators_pass_opcheck(cce, schedule):
    """Schema, autograd registration, fakes against the real outputs, and tracing with dynamic shapes."""
    case = make_case(12, V, D, bias=True)
    e, c, bias = (t.requires_grad_() for t in (case.e, case.c, case.bias))
    calls, options = [], {"softcap": 5.0, "vocab_size": V - 2, "schedule": schedule}

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == cce.__name__:
                calls.append((function, args, kwargs or {}))
            return function(*args, **(kwargs or {}))

    with Record():
        if schedule == "single_pass":
            cce.linear_cross_entropy(
                e, c, case.targets, bias, token_weight=torch.rand(12), z_loss=1e-2, **options
            ).backward()
        else:
            options |= {"label_smoothing": 0.1, "return_lse": True}
            loss, lse = cce.linear_cross_entropy(e, c, case.targets, bias, **options)
            (loss + lse.sum()).backward()
    assert len({function for function, *_ in calls}) == 2, [str(function) for function, *_ in calls]
    for function, args, kwargs in calls:
        torch.library.opcheck(function, args, kwargs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("needs", [("e",), ("c", "bias"), ("e", "c", "bias")])
def test_compiled_single_pass(cce, needs):
    """Frozen sides, an upstream gradient that is not 1, weights and a divisor."""
    case = make_case(40, V, D, ignored=0.3, bias=True)
    compiled = torch.compile(cce.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    options = {"schedule": "single_pass", "token_weight": torch.rand(40), "num_items": torch.tensor(17)}
    results = []
    for function in (compiled, cce.linear_cross_entropy):
        leaves = {name: getattr(case, name).clone().requires_grad_(name in needs) for name in ("e", "c", "bias")}
        loss = function(targets=case.targets, **leaves, **options) * -2.5
        results.append((loss.detach(), *torch.autograd.grad(loss, [leaves[name] for name in needs])))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_compiled_single_pass_refuses_what_eager_refuses(cce):
    case = make_case(12, V, D)
    compiled = torch.compile(cce.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="schedule.*single_pass.*return_lse"):
        compiled(case.e.requires_grad_(), case.c, case.targets, schedule="single_pass", return_lse=True)
    with pytest.raises(ValueError, match="workspace"):
        compiled(case.e, case.c, case.targets, schedule="single_pass", workspace=1)


def test_inductor_single_pass(cce):
    """Ignored rows exactly 0, NaN in them or not."""
    compiled = torch.compile(cce.linear_cross_entropy, fullgraph=True, dynamic=True)
    for n in (64, 37):
        case = make_case(n, V, D, ignored=0.5)
        ignored = case.targets == -100
        case.e[ignored] = float("nan")
        got = gradients(compiled, case, schedule="single_pass")
        assert (got[1][ignored] == 0).all()
        for a, b in zip(got, gradients(cce.linear_cross_entropy, case, schedule="single_pass"), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_fake_tensors(cce):
    """Shapes and dtypes without a byte of memory, for sizes that no machine holds."""
    with FakeTensorMode():
        e = torch.empty(2**20, 8192, dtype=torch.bfloat16, requires_grad=True)
        c = torch.empty(2**20, 8192, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(2**20, dtype=torch.long)
        loss, lse = cce.linear_cross_entropy(e, c, targets, reduction="none", return_lse=True)
        assert loss.shape == lse.shape == (2**20,) and loss.dtype == lse.dtype == torch.float32
        loss.sum().backward()
        assert e.grad.shape == e.shape and c.grad.dtype == torch.bfloat16
        e.grad = c.grad = None
        loss = cce.linear_cross_entropy(e, c, targets, schedule="single_pass")
        loss.backward()
        assert loss.shape == () and loss.dtype == torch.float32
        assert e.grad.shape == e.shape and c.grad.dtype == torch.bfloat16
        stats = cce.linear_token_stats(e, c, targets)
        assert stats.prediction.dtype == torch.int64 and stats.correct.dtype == torch.bool


def test_fakes_agree_with_the_results(cce):
    """Shape, dtype and stride of every output and gradient."""
    case = make_case((3, 5), V, D, torch.bfloat16, bias=True, reduction="none", return_lse=True)
    want = run(cce.linear_cross_entropy, case)
    with FakeTensorMode() as mode:
        e, c, targets, bias = map(mode.from_tensor, (case.e, case.c, case.targets, case.bias))
        e, c, bias = (t.requires_grad_() for t in (e, c, bias))
        loss, lse = cce.linear_cross_entropy(e, c, targets, bias, reduction="none", return_lse=True)
        got = dict(zip(("de", "dc", "dbias"), torch.autograd.grad(loss.sum() + lse.sum(), (e, c, bias)), strict=True))
    for name, t in {"loss": loss, "lse": lse, **got}.items():
        assert (t.shape, t.dtype, t.stride()) == (want[name].shape, want[name].dtype, want[name].stride()), name


@pytest.mark.parametrize("dynamic", [False, True])
def test_export_of_an_evaluation_step(cce, dynamic):
    class Evaluate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(D, V, bias=False)

        def forward(self, hidden, targets):
            return cce.linear_cross_entropy(hidden, self.lm_head.weight, targets, shift=True, reduction="none")

    module = Evaluate().eval()
    case = make_case((4, 9), V, D)
    batch = torch.export.Dim("batch", min=2, max=512)
    shapes = {"hidden": {0: batch}, "targets": {0: batch}} if dynamic else None
    with torch.no_grad():
        program = torch.export.export(module, (case.e, case.targets), dynamic_shapes=shapes)
    again = make_case((7, 9) if dynamic else (4, 9), V, D, seed=3)
    torch.testing.assert_close(program.module()(again.e, again.targets), module(again.e, again.targets).detach())
