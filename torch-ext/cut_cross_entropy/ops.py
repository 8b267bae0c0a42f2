"""The custom operators, their fakes and their derivative. Nothing else registers anything.

Gradients that nobody asked for come back as empty tensors (an operator cannot return None), outputs never alias inputs,
arguments are never changed, and autocast is off in every body: functional.py has already cast.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix
from .backends import backend_of
from .problem import Fold, Gradients, Problem
from .schedules import recompute, single_pass


def _undisturbed(device):
    """What the bodies below run in: autocast off, and the tensors' device the current one."""
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(device))
        return stack.pop_all()


def _row_major(t):
    """The kernels and GEMMs address rows of contiguous columns; any other layout is copied once."""
    return t if t.stride(1) == 1 and t.stride(0) >= t.shape[1] else t.contiguous()


def _real(t, vocab_size):
    """The rows of real classes."""
    return t if t is None or t.shape[0] == vocab_size else t[:vocab_size]


def _problem(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size):
    return Problem(
        _row_major(e),
        _row_major(_real(c, vocab_size)),
        targets.contiguous(),
        None if bias is None else _real(bias, vocab_size).contiguous(),
        None if weight is None else _real(weight, vocab_size).contiguous(),
        ignore_index,
        softcap,
        scale,
        temperature,
    )


def _new_gradients(e, c, bias, vocab_size, needs):
    """Room for dE [N, D], dC [V, D] and dbias [V], None where not wanted, and the part of it that is to be written."""
    room = Gradients(
        *(
            torch.empty(t.shape, dtype=t.dtype, device=e.device) if need else None
            for t, need in zip((e, c, bias), needs, strict=True)
        )
    )
    for gradient in room[1:]:
        if gradient is not None and vocab_size < len(gradient):
            gradient[vocab_size:].zero_()
    return room, Gradients(room.de, *(_real(gradient, vocab_size) for gradient in room[1:]))


def _filled(like, tensors, dtypes):
    """What an operator returns: empty tensors in place of None."""
    return tuple(like.new_empty(0, dtype=d) if t is None else t for t, d in zip(tensors, dtypes, strict=True))


def _fake_gradients(e, c, bias, needs):
    return tuple(t.new_empty(t.shape) if need else e.new_empty(0) for t, need in zip((e, c, bias), needs, strict=True))


def _fold(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size,
          want_smooth, want_entropy, want_prediction, needs, workspace, keep, counted=False):  # fmt: skip
    """The `Fold`, with a panel for the backward where `keep` allows one and the workspace has room for it.

    A workspace that the backward could not keep to is refused.
    """
    backend, wanted, kept = backend_of(e.device), (want_smooth, want_entropy, want_prediction), 0
    if workspace is not None:
        kept = None if keep and any(needs) else 0
        kept = recompute.planned(backend, e, vocab_size, needs, workspace, kept=kept).kept
    problem = _problem(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size)
    with _undisturbed(e.device):
        return recompute.forward(backend, problem, *wanted, keep=kept, counted=counted)


def _recompute_backward(e, c, targets, bias, weight, fold, upstream, options, needs, workspace):
    """dE [N, D], dC [V, D], dbias [V], each in its input's dtype, or None."""
    problem = _problem(e, c, targets, bias, weight, *options)
    room, gradients = _new_gradients(e, c, bias, options[-1], needs)
    with _undisturbed(e.device):
        upstream = recompute.row_gradients(problem, *upstream)
        recompute.backward(backend_of(e.device), problem, fold, upstream, gradients, workspace)
    return room


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Fold`, empty where not asked for."""
    found = _fold(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size,
                  want_smooth, want_entropy, want_prediction, needs, workspace, keep=False)  # fmt: skip
    single, integer = torch.float32, torch.int32
    dtypes = (single, single, single, single, torch.int64, single, single, integer, integer)
    return _filled(e, found[: len(dtypes)], dtypes)


@fold.register_fake
def _(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size,
      want_smooth, want_entropy, want_prediction, needs, workspace):  # fmt: skip
    n = e.shape[0]

    def row(wanted=True, dtype=torch.float32):
        return e.new_empty((n if wanted else 0,), dtype=dtype)

    return (
        row(), row(), row(want_smooth), row(want_entropy), row(want_prediction, torch.int64),
        row(), row(), row(dtype=torch.int32), e.new_empty((1,), dtype=torch.int32),
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("recompute_backward"), mutates_args=())
def recompute_backward(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Optional[Tensor],
    weight: Optional[Tensor],
    nll: Tensor,
    entropy: Optional[Tensor],
    m: Tensor,
    s: Tensor,
    rows: Tensor,
    count: Tensor,
    g_nll: Optional[Tensor],  # [N], any stride
    g_lse: Optional[Tensor],
    g_smooth: Optional[Tensor],
    g_entropy: Optional[Tensor],
    ignore_index: int,
    softcap: Optional[float],
    scale: float,
    temperature: float,
    vocab_size: int,
    needs: Sequence[bool],
    workspace: Optional[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """dE [N, D], dC [V, D], dbias [V], each in its input's dtype, or empty."""
    upstream, options = (g_nll, g_lse, g_smooth, g_entropy), (ignore_index, softcap, scale, temperature, vocab_size)
    fold = Fold(nll, nll, None, entropy, None, m, s, rows, count)
    found = _recompute_backward(e, c, targets, bias, weight, fold, upstream, options, needs, workspace)
    return _filled(e, found, (e.dtype,) * 3)


@recompute_backward.register_fake
def _(e, c, targets, bias, weight, nll, entropy, m, s, rows, count, g_nll, g_lse, g_smooth, g_entropy, ignore_index,
      softcap, scale, temperature, vocab_size, needs, workspace):  # fmt: skip
    return _fake_gradients(e, c, bias, needs)


def _needs(ctx):
    need_de, need_dc, _, need_dbias, *_ = ctx.needs_input_grad
    return [need_de, need_dc, need_dbias]


def _of_inputs(ctx, gradients):
    """Gradients of e, c and bias as those of all inputs."""
    de, dc, dbias = (t if need else None for t, need in zip(gradients, _needs(ctx), strict=True))
    return de, dc, None, dbias, *[None] * (len(ctx.needs_input_grad) - 4)


def _setup_context(ctx, inputs, output):
    *tensors, ignore_index, softcap, scale, temperature, vocab_size, _, _, _, _, workspace = inputs
    nll, _, _, entropy, prediction, *state = output
    ctx.save_for_backward(*tensors, nll, entropy if entropy.numel() else None, *state)
    ctx.options, ctx.workspace = (ignore_index, softcap, scale, temperature, vocab_size), workspace
    ctx.mark_non_differentiable(prediction, *state)
    ctx.set_materialize_grads(False)


def _backward(ctx, g_nll, g_lse, g_smooth, g_entropy, *_):
    upstream = (g_nll, g_lse, g_smooth, g_entropy)
    if all(g is None for g in upstream):
        return (None,) * len(ctx.needs_input_grad)
    found = recompute_backward(*ctx.saved_tensors, *upstream, *ctx.options, _needs(ctx), ctx.workspace)
    return _of_inputs(ctx, found)


fold.register_autograd(_backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, whose checks cost more than a small step does. `keep` comes after the inputs."""

    @staticmethod
    def forward(ctx, *inputs):
        found = _fold(*inputs, counted=any(ctx.needs_input_grad))
        *tensors, ctx.counting = found
        ctx.save_for_backward(*inputs[:5], *tensors)
        ctx.options, ctx.workspace = inputs[5:10], inputs[-2]
        ctx.mark_non_differentiable(*(t for t in (found.prediction, found.count) if t is not None))
        ctx.set_materialize_grads(False)
        return found.nll, found.lse, found.smooth, found.entropy, found.prediction, found.count

    @staticmethod
    def backward(ctx, g_nll, g_lse, g_smooth, g_entropy, *_):
        upstream = (g_nll, g_lse, g_smooth, g_entropy)
        if all(g is None for g in upstream):
            return (None,) * len(ctx.needs_input_grad)
        inputs, found = ctx.saved_tensors[:5], Fold(*ctx.saved_tensors[5:], ctx.counting)
        if torch.is_grad_enabled():  # create_graph: the operator refuses to be differentiated
            state = (found.nll, found.entropy, found.m, found.s, found.rows, found.count)
            found = recompute_backward(*inputs, *state, *upstream, *ctx.options, _needs(ctx), ctx.workspace)
        else:
            found = _recompute_backward(*inputs, found, upstream, ctx.options, _needs(ctx), ctx.workspace)
        return _of_inputs(ctx, found)


def _single_pass(e, c, targets, bias, weight, weights, square, smooth, mean, ignore_index, softcap, scale,
                 temperature, vocab_size, needs, workspace, schedule):  # fmt: skip
    """The scalar loss, and its dE [N, D], dC [V, D] and dbias [V], each in its input's dtype, or None."""
    problem = _problem(e, c, targets, bias, weight, ignore_index, softcap, scale, temperature, vocab_size)
    room, gradients = _new_gradients(e, c, bias, vocab_size, needs)
    with _undisturbed(e.device):
        loss = single_pass.loss_and_gradients(
            backend_of(e.device), problem, weights, square, smooth, mean, gradients, workspace, schedule
        )
    return loss, *room


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
    """`_single_pass`, empty where it has None."""
    loss, *found = _single_pass(e, c, targets, bias, weight, weights, square, smooth, mean, ignore_index, softcap,
                                scale, temperature, vocab_size, needs, workspace, schedule)  # fmt: skip
    return loss, *_filled(e, found, (e.dtype,) * 3)


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
    with _undisturbed(e.device):
        backend_of(e.device).scale(upstream, *gradients)
    return gradients


@scaled.register_fake
def _(e, c, bias, de, dc, dbias, upstream):
    return tuple(t.new_empty(t.shape) for t in (de, dc, dbias))


def _single_pass_setup(ctx, inputs, output):
    e, c, _, bias, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(e, c, bias, *output[1:])


def _single_pass_backward(ctx, upstream, *_):
    if upstream is None:
        return (None,) * len(ctx.needs_input_grad)
    return _of_inputs(ctx, scaled(*ctx.saved_tensors, upstream))


single_pass_forward.register_autograd(_single_pass_backward, setup_context=_single_pass_setup)


class _EagerSinglePass(torch.autograd.Function):
    """The same without the dispatcher. The gradients are handed out, not copied: a second backward makes them anew."""

    @staticmethod
    def forward(ctx, *inputs):
        loss, *ctx.gradients = _single_pass(*inputs)
        ctx.options = inputs[8:]
        ctx.save_for_backward(*inputs[:8])
        return loss

    @staticmethod
    def backward(ctx, upstream):
        (e, c, _, bias, *_), gradients = ctx.saved_tensors, ctx.gradients
        ctx.gradients = None
        if gradients is None:
            with torch.no_grad():
                _, *gradients = _single_pass(*ctx.saved_tensors, *ctx.options)
        if torch.is_grad_enabled():
            gradients = scaled(e, c, bias, *_filled(e, gradients, (e.dtype,) * 3), upstream)
        else:
            with _undisturbed(e.device):
                backend_of(e.device).scale(upstream, *gradients)
        return _of_inputs(ctx, gradients)


def eager(*tensors):
    """Whether nothing looks on: plain tensors, no compiler, dispatch mode or functorch."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(t is None or type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


def run_fold(*inputs, keep):
    """nll, lse, smooth, entropy, prediction and count: of the eager form, which may `keep` a panel, or of `fold`."""
    if eager(*inputs[:5]):
        return _Eager.apply(*inputs, keep)
    nll, lse, smooth, entropy, prediction, _, _, _, count = fold(*inputs)
    return nll, lse, smooth, entropy, prediction, count


def single_pass_of(*tensors):
    """`single_pass_forward`, or its eager form."""
    return _EagerSinglePass.apply if eager(*tensors) else single_pass_forward


def _no_second_derivative(ctx, *_):
    raise NotImplementedError(
        "linear_cross_entropy has no second derivative: its gradient (create_graph=True) cannot be differentiated again"
    )


recompute_backward.register_autograd(_no_second_derivative)
scaled.register_autograd(_no_second_derivative)
