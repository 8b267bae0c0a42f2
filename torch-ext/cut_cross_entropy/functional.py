"""The public functions: check, flatten, shift, cast under autocast, and reduce. The kernels are below ops.py."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .backends import backend_of
from .planner import SCHEDULES
from .problem import Coefficients
from .schedules import single_pass

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Per-token tensors in the shape of targets. Ignored rows hold 0, 0, 0, -1 and False.

    logprob, lse and entropy are fp32 and differentiable; prediction (int64, the lowest id among ties) and correct
    (bool) are not.
    """

    logprob: Tensor
    lse: Tensor
    entropy: Tensor
    prediction: Tensor
    correct: Tensor


def linear_cross_entropy(
    e,  # [..., D]
    c,  # [V, D]
    targets,  # [...]
    bias=None,  # [V]
    ignore_index=-100,
    softcap=None,
    reduction="mean",
    shift=False,
    *,
    logit_scale=1.0,
    return_lse=False,
    schedule="auto",
    workspace=None,
    weight=None,  # [V]
    label_smoothing=0.0,
    z_loss=0.0,
    token_weight=None,  # [...]
    num_items=None,
    temperature=1.0,
    vocab_size=None,
):
    """Cross-entropy of ``e @ c.T`` against integer targets, without forming the [N, V] logits.

    With lse the log of the sum of exponentials of a row's logits and eps = label_smoothing,

        z    = softcap * tanh((e @ c.T + bias) * logit_scale / softcap) / temperature
        CE_i = (1 - eps) * weight[y_i] * (lse_i - z_iy) + eps / V * sum_v weight[v] * (lse_i - z_iv)

        none   token_weight_i * (CE_i + z_loss * lse_i^2)
        sum    the sum of these over tokens that are not ignored
        mean   sum(token_weight * CE) / (num_items or sum(token_weight * weight[y]))
               + z_loss * sum(token_weight * lse^2) / (num_items or sum(token_weight))

    Logits are never rounded to 16 bits: they stay in the fp32 accumulators of the matrix product. 6 or 8 N V D
    floating-point operations for the loss and both gradients; memory and schedule as `plan` says.

    Args:
        e: hidden states [..., D], bfloat16, float16 or float32, any strides.
        c: classifier (lm_head weight) [V, D], of the dtype of e.
        targets: class ids [...], int64 or int32, each in [0, V) or equal to ignore_index.
        bias: [V], any floating dtype, added to the dot products.
        ignore_index: targets of this value contribute nothing and get zero gradient, whatever their hidden states hold.
        softcap: bound of the logits, softcap * tanh(z / softcap) (Gemma 2, arXiv 2408.00118).
        reduction: "mean", "sum" or "none".
        shift: predict token t + 1 from position t: targets move by one along their last dimension and the last
            position of each row is ignored; "none" then returns [..., T - 1].
        logit_scale: number that multiplies the logits before softcap.
        return_lse: also return lse, fp32, differentiable, in the shape of the targets (0 where ignored).
        schedule: "recompute" rebuilds the logits in the backward, "single_pass" computes the gradients of a mean or sum
            with the loss, in three quarters of the operations; "auto" takes the faster one that fits the workspace.
        workspace: bytes over inputs and gradients that may be used; see `plan`.
        weight: class weights [V] as in F.cross_entropy (they get no gradient).
        label_smoothing: eps above, in [0, 1].
        z_loss: factor of lse^2 (PaLM, arXiv 2204.02311).
        token_weight: weight of each token, in the shape of targets (it gets no gradient; it shifts with them).
        num_items: the mean's divisor, a number or a 0-d tensor (it gets no gradient): tokens of the whole step under
            gradient accumulation.
        temperature: divides the logits after softcap.
        vocab_size: number of real classes where the last rows of c are padding; those have no probability and get
            zero gradient.

    Returns:
        The loss in fp32 (a scalar, or the shape of targets), and the lse if asked for. Over no valid token, or a zero
        divisor, it is 0 with zero gradients.

    Raises:
        TypeError: dtypes that differ or are not accepted, DTensor inputs.
        ValueError: shapes, devices or options that do not fit together, or too small a workspace.
        IndexError: a target out of range (on a CPU; on CUDA a device-side assertion, without a synchronisation).
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: got {reduction!r}, accepted are {', '.join(map(repr, REDUCTIONS))}")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, accepted are {', '.join(map(repr, SCHEDULES))}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: got {label_smoothing}, accepted is 0 to 1")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items: is the divisor of reduction='mean', got reduction={reduction!r}")
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"num_items: got shape {tuple(num_items.shape)}, accepted is a number or a 0-d tensor")
    if token_weight is not None:
        if not isinstance(token_weight, Tensor):
            raise TypeError(f"token_weight: got {type(token_weight).__name__}, accepted is a torch.Tensor")
        if token_weight.shape != targets.shape:
            raise ValueError(
                f"token_weight: got shape {tuple(token_weight.shape)}, "
                f"accepted is that of targets, {tuple(targets.shape)}"
            )
    for name, t in (("weight", weight), ("token_weight", token_weight), ("num_items", num_items)):
        if isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(f"{name}: requires a gradient, which is not defined here; pass {name}.detach()")

    flat = _Flat(e, c, targets, bias, weight, ignore_index, softcap, shift, logit_scale, temperature, vocab_size)
    mean = reduction == "mean"
    coefficients = flat.coefficients(mean, label_smoothing, z_loss, token_weight, num_items)
    # p and w are rounded apart there, which leaves little where they cancel.
    apart = softcap is not None or label_smoothing > 0.5 or flat.vocab_size < 64
    unserved = {
        "reduction='none'": reduction == "none", "return_lse": return_lse,
        "label_smoothing above 0.5, under a softcap or of fewer than 64 classes": label_smoothing and apart,
        "float16": flat.e.dtype == torch.float16,
    }  # fmt: skip
    if flat.takes_single_pass(schedule, workspace, [option for option, on in unserved.items() if on]):
        return flat.single_pass(coefficients, mean, schedule, workspace)
    keep = not (label_smoothing and apart)
    nll, lse, smooth, _, _, count = flat.fold(want_smooth=label_smoothing > 0.0, workspace=workspace, keep=keep)
    loss = coefficients.loss(nll, lse, smooth)
    if reduction == "none":
        loss = flat.unflatten(loss)
    elif mean and coefficients.nll is None:
        loss = loss.sum() / count.clamp(min=1)
    else:
        loss = loss.sum()
    return (loss, flat.unflatten(lse)) if return_lse else loss


def linear_token_stats(
    e,  # [..., D]
    c,  # [V, D]
    targets,  # [...]
    bias=None,  # [V]
    ignore_index=-100,
    softcap=None,
    shift=False,
    *,
    logit_scale=1.0,
    temperature=1.0,
    vocab_size=None,
    workspace=None,
):
    """Log-probability of the target, lse, entropy and argmax of every token, for evaluation and policy gradients.

    Arguments, shapes and errors are those of `linear_cross_entropy`. One pass over the classifier computes all; one
    backward pass takes any combination of upstream gradients on logprob, lse and entropy:
    H = lse - sum_v p_v z_v, dH/dz_v = -p_v (log p_v + H). A logit of -inf counts as 0 in H.

    Returns:
        TokenStats of tensors in the shape of targets.
    """
    flat = _Flat(e, c, targets, bias, None, ignore_index, softcap, shift, logit_scale, temperature, vocab_size)
    nll, lse, _, entropy, prediction, _ = flat.fold(want_entropy=True, want_prediction=True, workspace=workspace)
    correct = (prediction == flat.targets) & flat.valid
    return TokenStats(*map(flat.unflatten, (-nll, lse, entropy, prediction, correct)))


class _Flat:
    """One call's inputs, checked, cast as F.linear would, and flattened to [N, D] and [N]."""

    def __init__(
        self, e, c, targets, bias, weight, ignore_index, softcap, shift, logit_scale, temperature, vocab_size
    ):  # fmt: skip
        _check(e, c, targets, bias, weight, softcap, shift, logit_scale, temperature, vocab_size)
        device = e.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            e, c = e.to(dtype), c.to(dtype)
        if e.dtype != c.dtype:
            raise TypeError(f"e and c: got {e.dtype} and {c.dtype}, accepted is one dtype for both")
        self.shape, self.shift, self.ignore_index = targets.shape, shift, ignore_index
        self.e, self.c, self.bias, self.weight = e.reshape(-1, e.shape[-1]), c, bias, weight
        self.targets = self.rolled(targets, ignore_index)
        self.vocab_size = c.shape[0] if vocab_size is None else vocab_size
        self.needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (self.e, c, bias)]
        self.tensors = (self.e, c, self.targets, bias)
        self.options = (ignore_index, softcap, float(logit_scale), float(temperature), self.vocab_size)

    def rolled(self, per_token, fill):
        """[N]: each row's values moved one to the left where `shift`, its last position filled."""
        if self.shift and self.shape[-1] > 0:
            last = per_token.new_full((*self.shape[:-1], 1), fill)
            per_token = torch.cat((per_token[..., 1:], last), dim=-1)
        return per_token.reshape(-1)

    def unflatten(self, per_token):
        per_token = per_token.reshape(self.shape)
        return per_token[..., :-1] if self.shift else per_token

    @property
    def valid(self):
        return self.targets != self.ignore_index

    def fold(self, want_smooth=False, want_entropy=False, want_prediction=False, workspace=None, keep=False):
        nll, lse, smooth, entropy, prediction, count = ops.run_fold(
            *self.tensors, self.weight if want_smooth else None, *self.options,
            want_smooth, want_entropy, want_prediction, self.needs, workspace, keep=keep,
        )  # fmt: skip
        return nll, lse, smooth, entropy, prediction, count.squeeze(0)

    def coefficients(self, mean, label_smoothing, z_loss, token_weight, num_items):
        """What each token's terms count for in the loss. Of nll None where that is 1, or with `mean` 1 over the count
        of valid rows.
        """

        def share(x, weights):
            """With `mean` x over the sum of the weights, or over what takes its place; 0 where that is 0."""
            if not mean:
                return x
            divisor = weights.sum() if num_items is None else self.number(num_items)
            return torch.where(divisor == 0, 0.0, x / torch.where(divisor == 0, 1.0, divisor))

        tokens = square = smooth = None
        if token_weight is not None:
            tokens = torch.where(self.valid, self.rolled(token_weight, 0).float(), 0.0)
        elif z_loss or label_smoothing:
            tokens = self.valid.float()
        weights = tokens
        if self.weight is not None:
            y = torch.where(self.valid, self.targets, 0).clamp(0, self.weight.shape[0] - 1)
            of_class = torch.where(self.valid, self.weight.float()[y], 0.0)
            weights = of_class if tokens is None else tokens * of_class
        if z_loss:
            square = z_loss * share(tokens, tokens)
        if label_smoothing:
            smooth = label_smoothing / self.vocab_size * share(tokens, weights)
        if weights is not None:
            weights = share((1.0 - label_smoothing) * weights if label_smoothing else weights, weights)
        elif num_items is not None:
            weights = share(self.number(1.0), None).expand(self.e.shape[0])
        return Coefficients(weights, square, smooth)

    def number(self, x):
        """A number or a tensor of one as fp32 on the device of e."""
        if isinstance(x, Tensor):
            return x.detach().to(self.e.device, torch.float32).reshape(())
        return self.e.new_full((), x, dtype=torch.float32)

    def takes_single_pass(self, schedule, workspace, unserved):
        """Whether the gradients are computed with the loss. Traced code leaves the choice to the operator."""
        if schedule == "recompute" or not (self.needs[0] or self.needs[1]):
            return False
        if unserved:
            if schedule == "single_pass":
                raise ValueError(
                    f"schedule: 'single_pass' needs a scalar loss, got {', '.join(unserved)}; accepted is 'recompute'"
                )
            return False
        if not ops.eager(*self.tensors):
            return True
        backend = backend_of(self.e.device)
        plan = single_pass.planned(backend, self.e, self.vocab_size, self.needs, workspace, schedule)
        return plan.schedule == "single_pass"

    def single_pass(self, coefficients, mean, schedule, workspace):
        tensors = (*self.tensors, None if coefficients.smooth is None else self.weight, *coefficients)
        run = ops.single_pass_of(*tensors)
        found = run(*tensors, mean, *self.options, self.needs, workspace, schedule)
        return found[0] if isinstance(found, tuple) else found


def _check(e, c, targets, bias, weight, softcap, shift, logit_scale, temperature, vocab_size):
    named = {"e": e, "c": c, "targets": targets, "bias": bias, "weight": weight}
    for name, t in named.items():
        if t is None and name in ("bias", "weight"):
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, accepted is a torch.Tensor")
        if type(t).__name__ == "DTensor":
            raise TypeError(
                f"{name}: got a DTensor, accepted are plain tensors; pass {name}.full_tensor() (it is differentiable), "
                "or compute the loss inside the module that FSDP has gathered"
            )
        if t.device != e.device:
            raise ValueError(f"{name}: is on {t.device}, accepted is the device of e, {e.device}")
    if c.dim() != 2 or c.shape[0] == 0:
        raise ValueError(
            f"c: got shape {tuple(c.shape)}, accepted is [V, D] with V >= 1; an empty or one-dimensional weight is "
            "usually a ZeRO-3 or FSDP shard that has not been gathered (deepspeed.zero.GatheredParameters, unshard())"
        )
    if e.dim() == 0 or e.shape[-1] != c.shape[1]:
        raise ValueError(f"e and c: got shapes {tuple(e.shape)} and {tuple(c.shape)}, accepted are [..., D] and [V, D]")
    if e.shape[:-1] != targets.shape:
        raise ValueError(
            f"e and targets: got shapes {tuple(e.shape)} and {tuple(targets.shape)}, accepted are [..., D] and [...]"
        )
    if not isinstance(shift, bool):
        raise TypeError(f"shift: got {shift!r}, accepted is True (predict the next token) or False")
    if shift and targets.dim() == 0:
        raise ValueError("shift: needs targets with a last dimension to shift along, got a 0-d tensor")
    for name in ("e", "c"):
        if named[name].dtype not in DTYPES:
            raise TypeError(f"{name}: got {named[name].dtype}, accepted are {', '.join(map(str, DTYPES))}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets: got {targets.dtype}, accepted are torch.int64 and torch.int32")
    for name in ("bias", "weight"):
        t = named[name]
        if t is not None and (t.shape != c.shape[:1] or not t.is_floating_point()):
            raise ValueError(
                f"{name}: got shape {tuple(t.shape)} of {t.dtype}, "
                f"accepted is a floating tensor of shape [V] = [{c.shape[0]}]"
            )
    if isinstance(logit_scale, Tensor):
        raise TypeError("logit_scale: got a tensor, accepted is a number; multiply e by a learned scale instead")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap: got {softcap}, accepted is None or a number > 0")
    if not temperature > 0.0:
        raise ValueError(f"temperature: got {temperature}, accepted is a number > 0")
    if not -math.inf < logit_scale < math.inf:
        raise ValueError(f"logit_scale: got {logit_scale}, accepted is a finite number")
    if vocab_size is not None and not 0 < vocab_size <= c.shape[0]:
        raise ValueError(f"vocab_size: got {vocab_size}, accepted is 1 to V = {c.shape[0]}")
