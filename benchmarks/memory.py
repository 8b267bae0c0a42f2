"""Peak device memory of one step, as the caching allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: `before` is alive when the step starts (inputs, cuBLAS's workspace), `gradients` is what it returns."""

    before: int
    gradients: int
    peak: int

    @property
    def workspace(self) -> int:
        """Peak over inputs and gradients."""
        return self.peak - self.before - self.gradients


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def step_memory(
    forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor] = (), *, arena: int = 1 << 30
) -> Memory:
    """Memory of the second forward, and backward if there are leaves: the first warms cuBLAS's workspace.

    `arena` bytes are left free in one block beforehand. A tensor cut from it is counted to the next 512 bytes; one
    that comes from fresh device memory can be counted up to 1 MiB too large.
    """
    on_gpu = torch.cuda.is_available()
    before = 0
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        if on_gpu:
            release()
            torch.empty(arena, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        loss = forward()
        if leaves:
            loss.backward()
        del loss
    gradients = sum(leaf.grad.untyped_storage().nbytes() for leaf in leaves)
    return Memory(before, gradients, torch.cuda.max_memory_allocated() if on_gpu else gradients)
