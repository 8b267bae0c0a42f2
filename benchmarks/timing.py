"""Times by CUDA events, floors interleaved with what they are compared with; host time; the bare GEMMs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

Samples = dict[str, list[float]]


def interleaved(steps: Mapping[str, Callable[[], object]], *, repeats: int = 10, warmup: int = 2) -> Samples:
    """Milliseconds of every step, `repeats` each, in rounds: a drift of the clock reaches all of them alike.

    Every round has an order of its own, since what ran before a step decides the clock that it finds.
    """
    on_gpu, order = torch.cuda.is_available(), random.Random(0)
    for _ in range(warmup):
        for step in steps.values():
            step()
    marks = {name: [] for name in steps}
    for _ in range(repeats):
        for name in order.sample(list(steps), len(steps)):
            start = mark(on_gpu)
            steps[name]()
            marks[name].append((start, mark(on_gpu)))
    if on_gpu:
        torch.cuda.synchronize()
        return {name: [round(a.elapsed_time(b), 4) for a, b in pairs] for name, pairs in marks.items()}
    return {name: [round(1e3 * (b - a), 4) for a, b in pairs] for name, pairs in marks.items()}


def mark(on_gpu: bool):
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def host_time(step: Callable[[], object], *, repeats: int = 50, warmup: int = 10) -> list[float]:
    """Microseconds that the calls of one step take on the host, the device's queue empty before each."""
    samples = []
    for i in range(warmup + repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if i >= warmup:
            samples.append(round(1e6 * (time.perf_counter() - start), 1))
    return samples


def captured(step: Callable[[], object]) -> tuple[Callable[[], None], object]:
    """A step as a CUDA graph: what replays it, and what it returned, which every replay writes anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def device_operations(step: Callable[[], object]) -> int | str:
    """Kernels and copies that one step enqueues, as the profiler counts them, or why it could not."""
    try:
        with torch.profiler.profile() as profile:
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    except RuntimeError as error:
        return f"profiler: {error}"


def gemm_floors(e: torch.Tensor, c: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The three bare GEMMs of a step through cuBLAS on random data, V a multiple of 64: z, dE and dC."""
    n, d, v = e.shape[0], e.shape[1], -(-c.shape[0] // 64) * 64
    c = torch.cat([c, c[: v - c.shape[0]]])
    z, panel = e.new_empty(n, v), e.new_empty(n, v).normal_()
    de, dc = e.new_empty(n, d), e.new_empty(v, d)
    return {
        "z": lambda: torch.mm(e, c.T, out=z),
        "de": lambda: torch.mm(panel, c, out=de),
        "dc": lambda: torch.mm(panel.T, e, out=dc),
    }


def materialized(e, c, targets, *, fp32: bool = True, **options) -> torch.Tensor:
    """The usual route: the logits in the dtype of the inputs, the softmax in fp32 (or on the 16-bit logits)."""
    logits = F.linear(e, c)
    return F.cross_entropy(logits.float() if fp32 else logits, targets, **options)


def training_step(loss: Callable[[], torch.Tensor], leaves) -> Callable[[], None]:
    """Forward and backward, the gradients of the step before dropped first."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss().backward()

    return step
