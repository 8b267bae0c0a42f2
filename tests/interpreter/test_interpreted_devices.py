"""Where another GPU than that of the tensors is current: a launch takes the current one. No machine here has two."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from common.sweep import interpreted, single, with_blocks  # noqa: F401
from helpers import make_case, run


@pytest.fixture
def launched(cce, monkeypatch):
    """The count of launches, of which every one is where the device of the tensors is made current."""
    made_current = []

    class InItsPlace(Counter):
        def __setitem__(self, name, number):
            assert made_current, f"{name} is launched where any device may be current"
            super().__setitem__(name, number)

    @contextmanager
    def undisturbed(device):
        made_current.append(device)
        yield
        made_current.pop()

    launches = InItsPlace()
    monkeypatch.setattr(cce.backends.triton_backend.launch, "launches", launches)
    monkeypatch.setattr(cce.functional.ops, "_undisturbed", undisturbed)
    return launches


@pytest.mark.parametrize("is_eager", [True, False])
def test_every_launch_is_on_the_device_of_its_tensors(cce, launched, monkeypatch, is_eager):
    if not is_eager:
        monkeypatch.setattr(cce.functional.ops, "eager", lambda *tensors: False)
    blocks = with_blocks(cce, single(45, 70, 8), 3)
    panels = make_case((9,), 70, 8, torch.float32, reduction="none", label_smoothing=0.1)
    for case in (blocks, panels):
        launched.clear()
        run(cce.linear_cross_entropy, case)
        assert launched
    launched.clear()
    run(cce.linear_token_stats, make_case((9,), 70, 8, torch.float32))
    assert launched
    e = blocks.e.clone().requires_grad_()
    loss = cce.linear_cross_entropy(e, blocks.c, blocks.targets, **blocks.options)
    for keep in (True, False):
        launched.clear()
        loss.backward(retain_graph=keep)
        assert launched


def test_the_device_of_the_tensors_is_made_current(cce, monkeypatch):
    entered = []

    @contextmanager
    def current(device):
        entered.append(device)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", current)
    with cce.functional.ops._undisturbed(torch.device("cuda", 0)):
        assert not entered
    with cce.functional.ops._undisturbed(torch.device("cuda", 1)):
        assert entered == [torch.device("cuda", 1)]
    assert entered[1:] == ["left"]
