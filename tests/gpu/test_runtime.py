"""Streams, graphs, threads, compilation, synchronisation, and the same bits every time."""

import threading
import warnings

import pytest
import torch

from benchmarks.states import make
from benchmarks.timing import captured

from .contract import DEVICE, Result, check, hold, random_inputs, random_upstream, run, same_bits, size

SIZES = size((4096, 32000, 1024), (64, 512, 64))


def states(seed=0, ignored=0.1):
    return make(*size((1000, 5003, 256), (100, 503, 64)), torch.bfloat16, DEVICE, ignored=ignored, seed=seed)


def test_ten_runs_give_the_same_bits(cce):
    s = make(*SIZES, torch.bfloat16, DEVICE, ignored=0.3)
    options = {"reduction": "none", "return_lse": True, "softcap": 30.0}
    options |= {"upstream": random_upstream(len(s.targets)), "upstream_lse": random_upstream(len(s.targets), seed=2)}
    first = run(cce.linear_cross_entropy, s.e, s.c, s.targets, s.bias, **options)
    for _ in range(9):
        same_bits(first, run(cce.linear_cross_entropy, s.e, s.c, s.targets, s.bias, **options))


def test_permuted_vocabulary_permutes_the_classifier_gradient(cce):
    s = states(ignored=0.0)
    order = torch.randperm(len(s.c), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=DEVICE)
    plain = hold(cce, s.e, s.c, s.targets)
    permuted = hold(cce, s.e, s.c[order], place[s.targets])
    assert torch.allclose(permuted.loss, plain.loss, rtol=1e-6)
    assert torch.allclose(permuted.dc.float(), plain.dc[order].float(), rtol=2e-2, atol=1e-6)


@pytest.mark.cuda_only
def test_side_stream(cce):
    """Work is enqueued on the current stream, backward included: inputs are made there just before, behind a delay."""
    expected = states()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        e, c = expected.e * 1, expected.c * 1
        got = run(cce.linear_cross_entropy, e, c, expected.targets)
    torch.cuda.current_stream().wait_stream(stream)
    check(got, expected.e, expected.c, expected.targets)


@pytest.mark.cuda_only
def test_two_threads_on_two_streams(cce):
    inputs = [states(seed) for seed in range(2)]
    alone = [run(cce.linear_cross_entropy, s.e, s.c, s.targets) for s in inputs]
    together = [None, None]

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                together[i] = run(cce.linear_cross_entropy, inputs[i].e, inputs[i].c, inputs[i].targets)
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        same_bits(alone[i], together[i])


@pytest.mark.cuda_only
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_graph_capture_and_replay(cce, reduction):
    """Forward and backward in one CUDA graph; each replay sees new states, targets and other ignored rows."""
    s = states(0, ignored=0.3)
    e, c = s.e.clone().requires_grad_(), s.c.clone().requires_grad_()
    targets, upstream = s.targets.clone(), random_upstream(len(s.targets))

    def step():
        loss = cce.linear_cross_entropy(e, c, targets, reduction=reduction)
        return loss, *torch.autograd.grad(loss, (e, c), upstream if reduction == "none" else torch.ones_like(loss))

    replay, (loss, de, dc) = captured(step)
    for seed, ignored in ((0, 0.3), (1, 0.0), (2, 0.9)):
        new = states(seed, ignored)
        with torch.no_grad():
            e.copy_(new.e), c.copy_(new.c), targets.copy_(new.targets)
        replay()
        per_token = {"upstream": upstream} if reduction == "none" else {}
        check(Result(loss.detach(), de=de, dc=dc), new.e, new.c, new.targets, reduction=reduction, **per_token)
        assert not de[new.targets == -100].any()


@pytest.mark.cuda_only
def test_synchronisation(cce):
    """None in the forward, at most one (the count of valid rows) in the backward."""
    s = states()
    run(cce.linear_cross_entropy, s.e, s.c, s.targets)
    e, c = s.e.clone().requires_grad_(), s.c.clone().requires_grad_()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        loss = cce.linear_cross_entropy(e, c, s.targets)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronisations = [str(w.message) for w in caught if "synchronizing CUDA operation" in str(w.message)]
    assert len(synchronisations) <= 1, synchronisations


@pytest.mark.cuda_only
def test_the_backward_does_not_wait_for_the_fold(cce):
    """The count of valid rows was on its way before it: the host is done while the device still folds, some 13 ms."""
    s = make(16384, 128256, 2048, torch.bfloat16, DEVICE, ignored=0.1)
    e, c = s.e.requires_grad_(), s.c.requires_grad_()
    for _ in range(2):  # the first time kernels are loaded
        torch.cuda.synchronize()
        loss = cce.linear_cross_entropy(e, c, s.targets, reduction="none").sum()
        folded = torch.cuda.current_stream().record_event()
        loss.backward()
        waited = folded.query()
    assert not waited


@pytest.mark.cuda_only
@pytest.mark.parametrize("options", [{}, {"schedule": "recompute"}, {"reduction": "none", "return_lse": True}], ids=str)
def test_compiled_into_cuda_graphs(cce, options):
    """mode="reduce-overhead": the first call warms up, the second records, the others replay with other values."""
    torch._dynamo.reset()
    compiled = torch.compile(cce.linear_cross_entropy, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        e, c, targets, _ = random_inputs(500, 1021, 128, ignored=0.3, seed=seed)
        upstream = {}
        if "return_lse" in options:
            upstream = {"upstream": random_upstream(500), "upstream_lse": random_upstream(500, seed=2)}
        torch.compiler.cudagraph_mark_step_begin()
        check(run(compiled, e, c, targets, **upstream, **options), e, c, targets, **upstream, **options)


@pytest.mark.parametrize("options", ["plain", "none-lse-softcap"])
def test_compiled_whole_with_dynamic_tokens(cce, options):
    from torch._dynamo.testing import CompileCounterWithBackend

    keywords = {"plain": {}, "none-lse-softcap": {"reduction": "none", "return_lse": True, "softcap": 20.0}}[options]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(size("inductor", "aot_eager"))
    compiled = torch.compile(
        lambda e, c, targets, **kw: cce.linear_cross_entropy(e, c, targets, **kw), fullgraph=True, backend=counter
    )
    for n in (64, 257, 100, 1000, 2):
        e, c, targets, _ = random_inputs(n, 1021, 128, ignored=0.1 if n > 2 else 0.0)
        upstream = {"upstream": random_upstream(n), "upstream_lse": random_upstream(n, seed=2)} if keywords else {}
        got = run(compiled, e, c, targets, **upstream, **keywords)
        check(got, e, c, targets, **upstream, **keywords)
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations over five values of N"
