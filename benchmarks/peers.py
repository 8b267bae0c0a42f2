"""Other implementations of the loss, each behind one signature: (e [N, D], c [V, D], targets [N]) -> mean loss.

A peer is imported when it is loaded, so that one which is not installed, or does not run on this machine, fails alone.
Where a library offers a choice between speed and memory or accuracy, both sides stand here under their own names.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import materialized

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
IGNORE = -100


@dataclass(frozen=True, slots=True)
class Peer:
    name: str  # on the command line and in the results
    label: str  # in figures and tables
    load: Callable[[], Loss]
    package: str | None = None  # the distribution that it comes from; None: torch
    exact: bool = True  # False: leaves out what it takes for small

    def version(self) -> str:
        return metadata.version(self.package) if self.package else torch.__version__


# Plain torch.


def compiled() -> Loss:
    torch._dynamo.config.recompile_limit = 64  # every shape is compiled for itself
    return torch.compile(materialized, dynamic=False)


class TokenBlocks(torch.autograd.Function):
    """A loop over blocks of tokens: softmax in fp32, dlogits rounded once, dC added up in fp32."""

    ROWS = 1024

    @staticmethod
    def forward(ctx, e, c, targets):
        valid = targets != IGNORE
        count = valid.sum()
        loss = torch.zeros((), device=e.device)
        de, dc = torch.empty_like(e), torch.zeros(c.shape, device=c.device)
        y = targets.masked_fill(~valid, 0)[:, None]
        blocks = (t.split(TokenBlocks.ROWS) for t in (e, y, valid[:, None], de))
        for b_e, b_y, b_valid, b_de in zip(*blocks, strict=True):
            logp = (b_e @ c.T).float().log_softmax(-1)  # [rows, V]
            loss -= (logp.gather(1, b_y) * b_valid).sum()
            dlogits = logp.exp_().scatter_add_(1, b_y, logp.new_full(b_y.shape, -1.0))
            panel = dlogits.mul_(b_valid / count).to(e.dtype)
            torch.mm(panel, c, out=b_de)
            if dc.is_cuda:
                torch.addmm(dc, panel.T, b_e, out_dtype=dc.dtype, out=dc)
            else:
                dc.addmm_(panel.T.float(), b_e.float())
        ctx.save_for_backward(de, dc.to(c.dtype))
        return loss / count

    @staticmethod
    def backward(ctx, upstream):
        de, dc = ctx.saved_tensors
        return de.mul_(upstream), dc.mul_(upstream), None


def torch_chunked() -> Loss:
    """F.linear_cross_entropy of torch 2.13; under an older torch, from the two files of torch.nn.modules beside it."""
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())
    from linear_cross_entropy import _linear_cross_entropy_batch_chunked as chunked
    from linear_cross_entropy_options import LinearCrossEntropyOptions

    def loss(e, c, targets):
        options = LinearCrossEntropyOptions()._adjust(*e.shape, len(c), e.dtype, e.device)
        policy = (options.batch_chunk_size, options.acc_policy, options.acc_dtype, options.allow_retain_graph)
        return chunked(e, c, targets, None, None, "mean", IGNORE, 0.0, *policy, True, True, False)[0]

    return loss


# Libraries.


def liger(**options) -> Loss:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return partial(liger_fused_linear_cross_entropy, **options)


def fla(**options) -> Loss:
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    return lambda e, c, targets: fused_linear_cross_entropy_loss(e, targets, c, **options)


def quack(**options) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return partial(chunked_linear_cross_entropy, **options)


def apple(**options) -> Loss:
    """Loaded from where it is installed: its import name is also that of this repository's link to the sources."""
    name = "cut_cross_entropy"
    folder = metadata.distribution("cut-cross-entropy").locate_file(name)
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return partial(sys.modules[name].linear_cross_entropy, **options)


def verl(backward: str) -> Loss:
    """Its log probabilities, unreduced: it knows no ignored targets, so they are left out of the mean here."""
    from verl.utils.kernel import kernels
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    method = getattr(kernels.BackwardEnum, backward)

    def loss(e, c, targets):
        kernels.set_backward_method(method)
        valid = targets != IGNORE
        logprobs, _ = linear_cross_entropy(e, c, targets.masked_fill(~valid, 0), 1.0, "none")
        return -torch.where(valid, logprobs, 0).sum() / valid.sum()

    return loss


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch_bf16", "torch, 16-bit logits", lambda: partial(materialized, fp32=False)),
        Peer("torch_fp32", "torch, fp32 softmax", lambda: materialized),
        Peer("torch_compile", "torch.compile of it", compiled),
        Peer("torch_blocks", "torch, loop over 1024 tokens", lambda: TokenBlocks.apply),
        Peer("torch_chunked", "torch 2.13, chunked", torch_chunked),
        Peer("liger", "Liger", liger, "liger-kernel"),
        Peer("liger_8", "Liger, chunk_mem_const 8", partial(liger, chunk_mem_const=8), "liger-kernel"),
        Peer(
            "liger_8_fp32",
            "Liger, chunk_mem_const 8, fp32 dC",
            partial(liger, chunk_mem_const=8, accum_dtype=torch.float32),
            "liger-kernel",
        ),
        Peer("fla", "FLA", fla, "fla-core"),
        Peer("fla_16bit", "FLA, 16-bit dC", partial(fla, accumulate_grad_in_fp32=False), "fla-core"),
        Peer("apple", "Apple CCE, filter", apple, "cut-cross-entropy", exact=False),
        Peer("apple_exact", "Apple CCE, exact", partial(apple, filter_eps=None), "cut-cross-entropy"),
        Peer("verl_split_n", "verl, split N", partial(verl, "_Split_Dlogits_N"), "verl"),
        Peer("verl_separate", "verl, separate", partial(verl, "_Total_Separate"), "verl"),
        Peer("verl_fuse", "verl, fuse MN", partial(verl, "_Total_Fuse_MN"), "verl"),
        Peer("verl_split_m", "verl, split M", partial(verl, "_Split_Dlogits_M"), "verl"),
        Peer("quack", "QuACK", quack, "quack-kernels"),
        Peer("quack_2048", "QuACK, chunks of 2048", partial(quack, chunk_size=2048), "quack-kernels"),
    )
}
