"""How training code uses a loss: checkpointing, scaling, hooks, tied, frozen and merged weights, threads."""

import copy
import pickle
import threading

import pytest
import torch
from common.poison import poisoned_memory  # noqa: F401
from helpers import DEVICE, DTYPES, check, make_case, pick, relative_error, run, truth
from torch.utils.checkpoint import checkpoint

N, V, D = pick((40, 331, 24), (9, 37, 16))


def leaves(case):
    return [t.clone().requires_grad_() for t in (case.e, case.c)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_retain_graph(cce, dtype):
    """A second backward with another upstream gradient is right, and leaves the first one's results alone."""
    case = make_case(N, V, D, dtype, reduction="none")
    case.upstream["loss"] = torch.randn(N, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    e, c = leaves(case)
    loss = cce.linear_cross_entropy(e, c, case.targets, reduction="none")
    first = torch.autograd.grad(loss, (e, c), torch.ones_like(loss), retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(loss, (e, c), case.upstream["loss"], retain_graph=True)
    third = torch.autograd.grad(loss, (e, c), torch.ones_like(loss))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    want = check(cce, case)
    assert torch.equal(second[0], want["de"]) and torch.equal(second[1], want["dc"])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, e, torch.ones_like(loss))


def test_the_count_is_asked_for_before_the_fold(cce, monkeypatch):
    """So that the backward has it while rows are folded, and not at all where there is none."""
    backend, called = cce.backends.backend_of(torch.device(DEVICE)), []

    def watch(name):
        function = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *args, **options: called.append(name) or function(*args, **options))

    watch("count_later"), watch("fold")
    case = make_case(N, V, D, reduction="none")
    check(cce, case)
    assert called == ["count_later", "fold"]
    cce.linear_cross_entropy(case.e, case.c, case.targets, reduction="none")
    assert called[2:] == ["fold"]


def test_two_backwards_accumulate(cce):
    case = make_case(N, V, D)
    e, c = leaves(case)
    for _ in range(2):
        cce.linear_cross_entropy(e, c, case.targets).backward()
    once = run(cce.linear_cross_entropy, case)
    torch.testing.assert_close(e.grad, 2 * once["de"])
    torch.testing.assert_close(c.grad, 2 * once["dc"])


@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_token_stats"])
def test_second_derivatives_are_refused(cce, function):
    """A gradient that silently had none of its own would be worse."""
    case = make_case(N, V, D)
    e, c = leaves(case)
    result = getattr(cce, function)(e, c, case.targets)
    loss = result if torch.is_tensor(result) else result.logprob.sum()
    first = torch.autograd.grad(loss, (e, c), create_graph=True)
    for gradient in first:
        assert gradient.requires_grad
        with pytest.raises((NotImplementedError, RuntimeError), match="second|twice|double"):
            gradient.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(cce, reentrant):
    case = make_case((2, N), V, D, bias=True)
    x = torch.randn(2, N, D, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    layer = torch.nn.Linear(D, D, device=DEVICE)
    c = case.c.clone().requires_grad_()

    def loss(x, c):
        return cce.linear_cross_entropy(layer(x).tanh(), c, case.targets)

    plain = torch.autograd.grad(loss(x, c), [x, c, *layer.parameters()])
    layer.zero_grad()
    checkpoint(loss, x, c, use_reentrant=reentrant).backward()
    for got, want in zip((x.grad, c.grad, *(p.grad for p in layer.parameters())), plain, strict=True):
        torch.testing.assert_close(got, want)


def test_hooks(cce):
    """A tensor hook on e sees the gradient and may replace it; a post-accumulate hook runs once."""
    case = make_case(N, V, D)
    e, c = leaves(case)
    seen, accumulated = [], []
    hidden = e * 1
    hidden.register_hook(lambda g: seen.append(g.clone()) or g * 3)
    c.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    cce.linear_cross_entropy(hidden, c, case.targets).backward()
    want = run(cce.linear_cross_entropy, case)
    assert torch.equal(seen[0], want["de"]) and len(seen) == 1
    torch.testing.assert_close(e.grad, 3 * want["de"])
    assert len(accumulated) == 1 and torch.equal(accumulated[0], want["dc"])


def test_saved_tensor_hooks_and_in_place_changes(cce):
    """Inputs are saved as autograd saves them: offloading hooks see them, a later in-place change is an error."""
    case = make_case(N, V, D)
    e, c = leaves(case)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        cce.linear_cross_entropy(e, c, case.targets).backward()
    assert c.shape in packed
    hidden = e * 1
    loss = cce.linear_cross_entropy(hidden, c, case.targets)
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tied_embeddings(cce):
    """One weight as embedding and classifier: its gradient is the sum of both uses."""
    case = make_case((2, N), V, D)
    ids = torch.randint(V, (2, N), generator=torch.Generator().manual_seed(4)).to(DEVICE)

    def loss(weight, function):
        hidden = torch.nn.functional.embedding(ids, weight).tanh()
        return function(hidden, weight, case.targets, shift=True)

    weight = case.c.clone().requires_grad_()
    loss(weight, cce.linear_cross_entropy).backward()
    exact = case.c.double().requires_grad_()
    loss(exact, cce.reference.linear_cross_entropy).backward()
    assert relative_error(weight.grad, exact.grad) < 1e-5


def test_a_merged_low_rank_head(cce):
    """c = W + B @ A is no leaf: gradients reach the factors, and the frozen W gets none."""
    case = make_case(N, V, D)
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(4, D, generator=generator).to(DEVICE)
    b = (torch.randn(V, 4, generator=generator) * 0.1).to(DEVICE)

    def gradients(function, dtype):
        factors = [t.to(dtype).requires_grad_() for t in (a, b)]
        merged = case.c.to(dtype) + factors[1] @ factors[0]
        return torch.autograd.grad(function(case.e.to(dtype), merged, case.targets), factors)

    got = gradients(cce.linear_cross_entropy, torch.float32)
    want = gradients(cce.reference.linear_cross_entropy, torch.float64)
    assert all(relative_error(g, w) < 1e-5 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("frozen", ["e", "c"])
def test_frozen_sides(cce, frozen):
    case = make_case(N, V, D, bias=True)
    got = check(cce, case, needs=[name for name in ("e", "c") if name != frozen])
    assert f"d{frozen}" not in got and "dbias" not in got


def test_nothing_needs_a_gradient(cce):
    case = make_case(N, V, D)
    assert not cce.linear_cross_entropy(case.e, case.c, case.targets).requires_grad


@pytest.mark.parametrize("autocast_dtype", [t for t in DTYPES if t.itemsize == 2])
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_token_stats"])
def test_autocast(cce, function, autocast_dtype):
    """fp32 masters: both operands are cast as F.linear casts them, gradients come back in fp32."""
    case = make_case(N, V, D, bias=True)
    with torch.autocast(DEVICE, dtype=autocast_dtype):
        got = run(getattr(cce, function), case)
    cast = make_case(N, V, D, bias=True)
    cast.e, cast.c = case.e.to(autocast_dtype), case.c.to(autocast_dtype)
    want = run(getattr(cce, function), cast)
    for name, t in want.items():
        assert torch.equal(got[name], t.to(got[name].dtype)), name
    assert got["de"].dtype == got["dc"].dtype == got["dbias"].dtype == torch.float32
    check(cce, cast, function)


@pytest.mark.parametrize("mixed", ["e", "c"])
def test_autocast_of_mixed_dtypes(cce, mixed):
    """Under autocast hidden states in 16 bits meet fp32 weights; each gradient has its own input's dtype."""
    half = DTYPES[0]
    case = make_case(N, V, D)
    setattr(case, mixed, getattr(case, mixed).to(half))
    with torch.autocast(DEVICE, dtype=half):
        got = run(cce.linear_cross_entropy, case)
    assert got["de"].dtype == case.e.dtype and got["dc"].dtype == case.c.dtype


def test_autocast_switched_off(cce):
    case = make_case(N, V, D)
    with torch.autocast(DEVICE, dtype=DTYPES[0], enabled=False):
        got = run(cce.linear_cross_entropy, case)
    want = run(cce.linear_cross_entropy, case)
    assert all(torch.equal(got[name], t) for name, t in want.items())


def test_backward_under_autocast(cce):
    """Calling backward inside the autocast region does not cast the contractions."""
    case = make_case(N, V, D)
    want = run(cce.linear_cross_entropy, case)
    e, c = leaves(case)
    loss = cce.linear_cross_entropy(e, c, case.targets)
    with torch.autocast(DEVICE, dtype=DTYPES[0]):
        loss.backward()
    assert torch.equal(e.grad, want["de"]) and torch.equal(c.grad, want["dc"])


def test_grad_scaler(cce):
    """fp16 with the default initial scale of 65536 steps; an overflow is found and the step skipped."""
    case = make_case(N, V, D, torch.float16)
    weight = torch.nn.Parameter(case.c.float())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=65536.0)
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = cce.linear_cross_entropy(case.e.float(), weight, case.targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert relative_error(weight.grad, truth(cce, case)["dc"]) < 2e-3
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(weight.detach(), case.c.float()) and scaler.get_scale() == 65536.0

    before = weight.detach().clone()
    optimizer.zero_grad()
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = cce.linear_cross_entropy(case.e.float(), weight, case.targets)
    scaler.scale(loss * torch.tensor(1e38)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), before) and scaler.get_scale() < 65536.0


def test_functional_call(cce):
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(D, V, device=DEVICE)

        def forward(self, hidden, targets):
            return cce.linear_cross_entropy(hidden, self.lm_head.weight, targets, self.lm_head.bias)

    case = make_case(N, V, D, bias=True)
    parameters = {"lm_head.weight": case.c.clone().requires_grad_(), "lm_head.bias": case.bias.clone().requires_grad_()}
    loss = torch.func.functional_call(Head(), parameters, (case.e, case.targets))
    loss.backward()
    want = run(cce.linear_cross_entropy, case)
    assert torch.equal(loss.detach(), want["loss"])
    assert torch.equal(parameters["lm_head.weight"].grad, want["dc"])


def test_vmap(cce):
    case = make_case((3, N), V, D, ignored=0.0)
    want = torch.stack([cce.linear_cross_entropy(case.e[i], case.c, case.targets[i]) for i in range(3)])
    got = torch.vmap(lambda e, t: cce.linear_cross_entropy(e, case.c, t))(case.e, case.targets)
    torch.testing.assert_close(got, want)


def test_func_grad(cce):
    case = make_case(N, V, D)
    with pytest.raises(RuntimeError, match="functorch|torch.func"):
        torch.func.grad(lambda c: cce.linear_cross_entropy(case.e, c, case.targets))(case.c)


def test_deterministic_algorithms(cce):
    """Nothing to switch: no atomics anywhere. Torch fills fresh memory with NaN in this mode."""
    case = make_case(N, V, D, DTYPES[0], bias=True, label_smoothing=0.1, return_lse=True)
    want = run(cce.linear_cross_entropy, case)
    torch.use_deterministic_algorithms(True)
    try:
        got = run(cce.linear_cross_entropy, case)
        stats = run(cce.linear_token_stats, make_case(N, V, D, DTYPES[0]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(got[name], t) for name, t in want.items())
    assert all(stats[name].isfinite().all() for name in ("logprob", "lse", "entropy", "de", "dc"))


@pytest.mark.skipif(pick(False, True), reason="the interpreter patches triton.language, one thread at a time")
def test_two_threads(cce):
    """Forward and backward of two threads at once, each right."""
    cases = [make_case(N + 7 * i, V, D, seed=i) for i in range(2)]
    want = [run(cce.linear_cross_entropy, case) for case in cases]
    got = [[] for _ in cases]
    barrier = threading.Barrier(2)

    def work(i):
        barrier.wait()
        for _ in range(10):
            got[i].append(run(cce.linear_cross_entropy, cases[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, results in enumerate(got):
        assert len(results) == 10
        assert all(torch.equal(r[name], t) for r in results for name, t in want[i].items())


def test_layer(cce):
    """Stateless, as kernelize wants it; copied and pickled like any module."""
    layer = cce.layers.LinearCrossEntropy()
    assert not list(layer.parameters()) and not list(layer.buffers()) and not layer.state_dict()
    assert "__init__" not in vars(cce.layers.LinearCrossEntropy)
    case = make_case((2, N), V, D, bias=True)
    options = {"shift": True, "label_smoothing": 0.1, "reduction": "sum"}
    want = cce.linear_cross_entropy(case.e, case.c, case.targets, case.bias, **options)
    for module in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(module(case.e, case.c, case.targets, case.bias, **options), want)


def test_layer_tells_the_truth(cce):
    """has_backward: gradients arrive. can_torch_compile is shown in test_compile.py."""
    layer = cce.layers.LinearCrossEntropy
    assert layer.has_backward is True and layer.can_torch_compile is True
    case = make_case(N, V, D)
    e, c = leaves(case)
    layer()(e, c, case.targets).backward()
    want = run(cce.linear_cross_entropy, case)
    assert torch.equal(e.grad, want["de"]) and torch.equal(c.grad, want["dc"])


def test_statistics_can_be_copied(cce):
    case = make_case(N, V, D)
    stats = cce.linear_token_stats(case.e, case.c, case.targets)
    for again in (copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert torch.equal(again.entropy, stats.entropy)
