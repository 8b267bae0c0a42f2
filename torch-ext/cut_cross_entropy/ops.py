"""The custom operators, their fakes and their derivative. Nothing else registers anything.

Gradients that nobody asked for come back as empty tensors (an operator cannot return None), outputs never alias inputs,
arguments are never changed, and autocast is off in every body: functional.py has already cast.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix
from .backends import backend_of
from .problem import Fold, Gradients, Problem
from .schedules import recompute, single_pass


def _no_autocast(device):
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _row_major(t):
    """The kernels and GEMMs address rows of contiguous columns; any other layout is copied once."""
    return t if t.stride(1) == 1 and t.stride(0) >= t.shape[1] else t.contiguous()


def _problem(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size):
    return Problem(
        _row_major(e),
        _row_major(c[:vocab_size]),
        targets.contiguous(),
        None if bias is None else bias[:vocab_size].contiguous(),
        None if weight is None else weight[:vocab_size].contiguous(),
        ignore_index,
        softcap,
        scale,
        temperature,
    )


def _new_gradients(e, c, bias, vocab_size, needs):
    """Room for dE [N, D], dC [V, D] and dbias [V], empty where not wanted, and the part of it that is to be written."""
    room = tuple(
        torch.empty(t.shape, dtype=t.dtype, device=e.device) if need else e.new_empty(0)
        for t, need in zip((e, c, bias), needs, strict=True)
    )
    for gradient in room[1:]:
        gradient[vocab_size:].zero_()
    real = (room[0], room[1][:vocab_size], room[2][:vocab_size])
    return room, Gradients(*(t if need else None for t, need in zip(real, needs, strict=True)))


def _fake_gradients(e, c, bias, needs):
    return tuple(t.new_empty(t.shape) if need else e.new_empty(0) for t, need in zip((e, c, bias), needs, strict=True))


def _present(t):
    return None if t.numel() == 0 else t


@torch.library.custom_op(add_op_namespace_prefix("fold"), mutates_args=())
def fold(
    e: Tensor,  # [N, D]
    c: Tensor,  # [V, D]
    targets: Tensor,  # [N] int64 or int32
    bias: Optional[Tensor],  # [V]
    weight: Optional[Tensor],  # [V]
    ignore_index: int,
    softcap: Optional[float],
    scale: float,
    temperature: float,
    vocab_size: int,
    want_smooth: bool,
    want_entropy: bool,
    want_prediction: bool,
    needs: Sequence[bool],  # gradients that the backward will be asked for: of e, c, bias
    workspace: Optional[int],
    keep: bool,  # whether a panel may be kept for the backward
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Fold`, empty where not asked for. A workspace that the backward could not keep to is refused."""
    kept = 0
    if workspace is not None:
        keep = keep and any(needs) and not (want_smooth or want_entropy or want_prediction)
        kept = recompute.planned(backend_of(e.device), e, vocab_size, needs, workspace, kept=None if keep else 0).kept
    problem = _problem(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size)
    with _no_autocast(e.device.type):
        out = recompute.forward(
            backend_of(e.device),
            problem,
            want_smooth=want_smooth,
            want_entropy=want_entropy,
            want_prediction=want_prediction,
            keep=kept,
        )

    def present(t, dtype=torch.float32):
        return e.new_empty(0, dtype=dtype) if t is None else t

    return (
        out.nll, out.lse, present(out.smooth), present(out.entropy), present(out.prediction, torch.int64),
        out.m, out.s, out.rows, out.count, present(out.kept, e.dtype), present(out.overflow, torch.int32),
    )  # fmt: skip


@fold.register_fake
def _(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size,
      want_smooth, want_entropy, want_prediction, needs, workspace, keep):  # fmt: skip
    n = e.shape[0]

    def row(wanted=True, dtype=torch.float32):
        return e.new_empty((n if wanted else 0,), dtype=dtype)

    return (
        row(), row(), row(want_smooth), row(want_entropy), row(want_prediction, torch.int64),
        row(), row(), row(dtype=torch.int32), e.new_empty((1,), dtype=torch.int32),
        e.new_empty(0), e.new_empty(0, dtype=torch.int32),
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("recompute_backward"), mutates_args=())
def recompute_backward(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Optional[Tensor],
    weight: Optional[Tensor],
    nll: Tensor,
    entropy: Tensor,
    m: Tensor,
    s: Tensor,
    rows: Tensor,
    count: Tensor,
    kept: Tensor,
    overflow: Tensor,
    g_nll: Optional[Tensor],  # [N], any stride
    g_lse: Optional[Tensor],
    g_smooth: Optional[Tensor],
    g_entropy: Optional[Tensor],
    ignore_index: int,
    softcap: Optional[float],
    scale: float,
    temperature: float,
    vocab_size: int,
    need_de: bool,
    need_dc: bool,
    need_dbias: bool,
    workspace: Optional[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """dE [N, D], dC [V, D], dbias [V], each in its input's dtype, or empty."""
    problem = _problem(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size)
    room, gradients = _new_gradients(e, c, bias, vocab_size, (need_de, need_dc, need_dbias))
    with _no_autocast(e.device.type):
        upstream = recompute.row_gradients(problem, g_nll, g_lse, g_smooth, g_entropy)
        recompute.backward(
            backend_of(e.device),
            problem,
            Fold(nll, nll, None, _present(entropy), None, m, s, rows, count, _present(kept), overflow),
            upstream,
            gradients,
            workspace,
        )
    return room


@recompute_backward.register_fake
def _(e, c, targets, bias, weight, nll, entropy, m, s, rows, count, kept, overflow, g_nll, g_lse, g_smooth, g_entropy,
      ignore_index, softcap, scale, temperature, vocab_size, need_de, need_dc, need_dbias, workspace):  # fmt: skip
    return _fake_gradients(e, c, bias, (need_de, need_dc, need_dbias))


def _setup_context(ctx, inputs, output):
    e, c, targets, bias, weight, *options, _, _, _, _, workspace, _ = inputs
    nll, _, _, entropy, prediction, *state = output
    ctx.save_for_backward(e, c, targets, bias, weight, nll, entropy, *state)
    ctx.options, ctx.workspace = options, workspace
    ctx.mark_non_differentiable(prediction, *state)
    ctx.set_materialize_grads(False)


def _backward(ctx, g_nll, g_lse, g_smooth, g_entropy, *_, run=None):
    need_de, need_dc, _, need_dbias, *_ = ctx.needs_input_grad
    if all(g is None for g in (g_nll, g_lse, g_smooth, g_entropy)):
        return (None,) * len(ctx.needs_input_grad)
    de, dc, dbias = (run or recompute_backward)(
        *ctx.saved_tensors, g_nll, g_lse, g_smooth, g_entropy, *ctx.options, need_de, need_dc, need_dbias, ctx.workspace
    )
    gradients = [None] * len(ctx.needs_input_grad)
    gradients[0] = de if need_de else None
    gradients[1] = dc if need_dc else None
    gradients[3] = dbias if need_dbias else None
    return tuple(gradients)


fold.register_autograd(_backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same bodies and derivative without the dispatcher, whose checks cost more than a small step does."""

    @staticmethod
    def forward(ctx, *inputs):
        output = fold._init_fn(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, *gradients):
        create_graph = torch.is_grad_enabled()
        return _backward(ctx, *gradients, run=None if create_graph else recompute_backward._init_fn)


@torch.library.custom_op(add_op_namespace_prefix("single_pass"), mutates_args=())
def single_pass_forward(
    e: Tensor,  # [N, D]
    c: Tensor,  # [V, D]
    targets: Tensor,  # [N] int64 or int32
    bias: Optional[Tensor],  # [V]
    weight: Optional[Tensor],  # [V], with smooth
    weights: Optional[Tensor],  # [N] fp32, of any stride
    square: Optional[Tensor],
    smooth: Optional[Tensor],
    mean: bool,
    ignore_index: int,
    softcap: Optional[float],
    scale: float,
    temperature: float,
    vocab_size: int,
    needs: Sequence[bool],  # gradients that are wanted: of e, c, bias
    workspace: Optional[int],
    schedule: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scalar loss, and its dE [N, D], dC [V, D] and dbias [V], each in its input's dtype, or empty."""
    problem = _problem(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size)
    room, gradients = _new_gradients(e, c, bias, vocab_size, needs)
    with _no_autocast(e.device.type):
        loss = single_pass.loss_and_gradients(
            backend_of(e.device), problem, weights, square, smooth, mean, gradients, workspace, schedule
        )
    return loss, *room


@single_pass_forward.register_fake
def _(e, c, targets, bias, weight, weights, square, smooth, mean, ignore_index, softcap, scale, temperature,
      vocab_size, needs, workspace, schedule):  # fmt: skip
    return e.new_empty((), dtype=torch.float32), *_fake_gradients(e, c, bias, needs)


@torch.library.custom_op(add_op_namespace_prefix("scale"), mutates_args=())
def scaled(
    e: Tensor, c: Tensor, bias: Optional[Tensor], de: Tensor, dc: Tensor, dbias: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """upstream times each gradient in new tensors. e, c and bias only mark what these depend on."""
    gradients = de.clone(), dc.clone(), dbias.clone()
    backend_of(e.device).scale(upstream, *gradients)
    return gradients


@scaled.register_fake
def _(e, c, bias, de, dc, dbias, upstream):
    return tuple(t.new_empty(t.shape) for t in (de, dc, dbias))


def _single_pass_setup(ctx, inputs, output):
    e, c, _, bias, *_, needs, _, _ = inputs
    ctx.needs = needs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(e, c, bias, *output[1:])


def _single_pass_gradients(ctx, *gradients):
    de, dc, dbias = (t if need else None for t, need in zip(gradients, ctx.needs, strict=True))
    return de, dc, None, dbias, *[None] * 13


def _single_pass_backward(ctx, upstream, *_):
    if upstream is None:
        return (None,) * 17
    return _single_pass_gradients(ctx, *scaled(*ctx.saved_tensors, upstream))


single_pass_forward.register_autograd(_single_pass_backward, setup_context=_single_pass_setup)


class _EagerSinglePass(torch.autograd.Function):
    """The same without the dispatcher. The gradients are handed out, not copied: a second backward makes them anew."""

    @staticmethod
    def forward(ctx, *inputs):
        loss, *gradients = single_pass_forward._init_fn(*inputs)
        ctx.needs, ctx.gradients, ctx.options = inputs[-3], gradients, inputs[8:]
        ctx.save_for_backward(*inputs[:8])
        return loss

    @staticmethod
    def backward(ctx, upstream):
        (e, c, _, bias, *_), gradients = ctx.saved_tensors, ctx.gradients
        ctx.gradients = None
        if gradients is None:
            with torch.no_grad():
                _, *gradients = single_pass_forward._init_fn(*ctx.saved_tensors, *ctx.options)
        if torch.is_grad_enabled():
            gradients = scaled(e, c, bias, *gradients, upstream)
        else:
            backend_of(e.device).scale(upstream, *gradients)
        return _single_pass_gradients(ctx, *gradients)


def eager(*tensors):
    """Whether nothing looks on: plain tensors, no compiler, dispatch mode or functorch."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(t is None or type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


def run_fold(*inputs):
    """`fold`, or its eager form, which may keep a panel."""
    if eager(*inputs[:5]):
        return _Eager.apply(*inputs, True)
    return fold(*inputs, False)


def single_pass_of(*tensors):
    """`single_pass_forward`, or its eager form."""
    return _EagerSinglePass.apply if eager(*tensors) else single_pass_forward


def _no_second_derivative(ctx, *_):
    raise NotImplementedError(
        "linear_cross_entropy has no second derivative: its gradient (create_graph=True) cannot be differentiated again"
    )


recompute_backward.register_autograd(_no_second_derivative)
scaled.register_autograd(_no_second_derivative)
