"""bf16 in Triton's interpreter, which holds it as 16-bit integers: it multiplies those, and rounds towards zero.

With `teach_bfloat16` products are of the numbers that they stand for and casts round to nearest, as on a GPU.
"""

import numpy as np
import torch


def _widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(x):
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def teach_bfloat16(monkeypatch):
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, d, *rest):
        a, b = (
            interpreter.TensorHandle(_widened(t.data), tl.float32) if t.dtype.scalar == tl.bfloat16 else t
            for t in (a, b)
        )
        return dot(self, a, b, d, *rest)

    def cast_impl(self, src, dst_type):
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_widened(src.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_rounded(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
