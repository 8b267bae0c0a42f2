"""Launching a kernel on the current stream, and counting it. The device of its tensors is the current one."""

from collections import Counter
from functools import partial

import torch

# Launches by kernel name, so that a test can assert that Triton ran.
launches = Counter()
# Compiled kernels by everything that the compiler specialises on: found here, a launch skips Triton's own, longer look.
_compiled = {}


def cdiv(a, b):
    """As `triton.cdiv`, which takes longer to call than to compute."""
    return -(-a // b)


def launch(kernel, programs, device, *args, compiled=None, tape=None, num_warps=4, num_stages=1, **constants):
    """Run `kernel` with its run-time arguments, then its compile-time ones in the order of its signature.

    Returns what was run, to be passed as `compiled` where only unspecialised arguments have changed since. A list
    `tape` gets a function that runs it again on the same tensors, without a look at them.
    """
    name = kernel.__name__
    if compiled is None:
        key = _key(args, name, device.index, num_warps, num_stages, *constants.values())
        compiled = _compiled.get(key)
    if compiled is None:
        launches[name] += 1
        options = dict(num_warps=num_warps, num_stages=num_stages)
        # The interpreter compiles nothing.
        compiled = _compiled[key] = kernel[(programs,)](*args, **constants, **options) or kernel
    else:
        _run(name, compiled, programs, (*args, *constants.values()))
    if tape is not None:
        tape.append(partial(_run, name, compiled, programs, (*args, *constants.values())))
    return compiled


def _run(name, compiled, programs, args):
    launches[name] += 1
    compiled[(programs, 1, 1)](*args)


def _key(args, *rest):
    """What a kernel is compiled for: types, and that an address or a number is divisible by 16, or a number is 1.

    One flat tuple: it is built and hashed at every launch.
    """
    key = [*rest]
    add = key.append
    for x in args:
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            add(x.dtype), add(x.data_ptr() & 15)
        elif kind is int:
            add(x if x < 2 else 2 + (x & 15) + (x >> 31 << 5))
        elif x is None or kind is float:
            add(None)
        else:
            add(kind), add(x.base.dtype), key.extend(x.block_shape)
    return tuple(key)
