"""Fresh memory holds NaN (the largest integer, True) while a test runs, so that reading it before writing shows."""

import pytest
import torch


def _poison(t):
    if t.is_floating_point():
        return t.fill_(float("nan"))
    return t.fill_(True if t.dtype == torch.bool else torch.iinfo(t.dtype).max)


def poison_memory(monkeypatch):
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _original=original, **kw: _poison(_original(*args, **kw)))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_memory(monkeypatch)
