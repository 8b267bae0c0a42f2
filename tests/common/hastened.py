"""Triton's interpreter without the work that it repeats: the same bits in a third of the time.

It patches triton.language at every call of a device function, makes a table of dtypes for every operation and a tuple
of its shape for every block, and computes by a dozen operations whether an integer overflows, to say so only when
debugging. Here that takes one operation, and an overflow is an error.
"""

import builtins
import functools
import math
from types import SimpleNamespace

import numpy as np

KNOWN = "3.6."  # whose internals these are; any other version runs as it is
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def hasten_interpreter(monkeypatch):
    import triton
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    np.seterr(all="ignore")  # a warning of every infinity costs more than the operation, and a GPU gives none
    if not triton.__version__.startswith(KNOWN):
        return

    # Nothing is compiled in a process that interprets: patched once, the language stays so.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patched = SimpleNamespace(restore=lambda: None)
    monkeypatch.setattr(interpreter, "_patch_lang", lambda function: patched)
    # NumPy warns of `int(array)`, which is what Triton makes of this.
    monkeypatch.setattr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))

    dtype_of, dtypes = interpreter._get_np_dtype, {}

    def known_dtype_of(kind):
        if isinstance(kind, (tl.pointer_type, tl.block_type)):
            return dtype_of(kind)
        if kind not in dtypes:
            dtypes[kind] = dtype_of(kind)
        return dtypes[kind]

    @functools.cache
    def shape_of(sizes):
        return tl.tuple([tl.constexpr(n) for n in sizes]), tl.constexpr(math.prod(sizes))

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(builtins.tuple(type.shape) if type.is_block() else ())

    make_block, blocks = tl.block_type.__init__, {}

    def make_known_block(self, element_ty, shape):
        key = element_ty.name, *[getattr(n, "value", n) for n in shape]
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self)
        vars(self).update(blocks[key])

    def assert_no_overflow(self, left, right, operation):
        kind = left.type.scalar
        if kind.int_bitwidth < 64:
            exact = OPERATIONS[operation.__name__](*(x.handle.data.astype(np.int64) for x in (left, right)))
            low, high = kind.get_int_min_value(), kind.get_int_max_value()
            assert low <= exact.min() and exact.max() <= high, f"{kind} overflow in {operation.__name__}"

    monkeypatch.setattr(interpreter, "_get_np_dtype", known_dtype_of)
    monkeypatch.setattr(tl.tensor, "__init__", make_tensor)
    monkeypatch.setattr(tl.block_type, "__init__", make_known_block)
    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", assert_no_overflow)
