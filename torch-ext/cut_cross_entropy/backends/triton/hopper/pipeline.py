"""Products of tiles by specialised warps, in Gluon: one warp loads, two groups of four warps multiply.

After its last product a group turns 64 x 256 dot products into exponentials, some 2000 clocks in which it has no use
for the tensor cores. Each group has half the rows of every tile and waits for nothing but its operands: while one
computes, the tensor cores go on with the other's product, and the operands of the next tile are on their way.

The operands pass through a ring of STAGES buffers, of which `step` counts the uses. `full` is signalled by the copies,
`empty` by both groups when their products have read a buffer.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..configs import Tile

# As Triton 3.8 and up call them, and what they were before.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

TILE = Tile(BM=128, BN=256, BK=64, warps=4, stages=4)
BM, BN, BK, _, STAGES = map(gl.constexpr, TILE)
# Rows of a group. Its results are finished, and leave through two buffers, a quarter of their columns at a time.
ROWS, QUARTER = gl.constexpr(64), gl.constexpr(64)
TILE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BN, 16]))
QUARTER_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BN // 4, 16]))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, QUARTER_LAYOUT.value))
COLUMN_LAYOUT = gl.constexpr(gl.SliceLayout(0, QUARTER_LAYOUT.value))
# Warps and registers a thread of the second group and of the loading warp. The first group is the kernel's own.
WORKER_WARPS, WORKER_REGISTERS = gl.constexpr([4, 1]), gl.constexpr([240, 24])


@functools.cache
def _shared_layout(rows, columns, dtype):
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def _descriptor(t, rows, columns):
    layout = _shared_layout(rows, columns, t.dtype)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns], layout)


def operands(e, c, panel):
    """Descriptors of the blocks in which e and c are loaded and a panel, if there is one, is stored."""
    panel = None if panel is None else _descriptor(panel, ROWS.value, QUARTER.value)
    return _descriptor(e, TILE.BM, TILE.BK), _descriptor(c, TILE.BN, TILE.BK), panel


def present(other, *tensors):
    """Partitions of warps take no None: `other` in place of what is absent and will not be read."""
    return [other if t is None else t for t in tensors]


@gluon.jit
def new_ring(e, c):
    """(buffers of e, of c, full, empty)"""
    ring_e = gl.allocate_shared_memory(e.dtype, [STAGES, BM, BK], e.layout)
    ring_c = gl.allocate_shared_memory(c.dtype, [STAGES, BN, BK], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    hopper.fence_async_shared()
    return ring_e, ring_c, full, empty


@gluon.jit
def load(ring, e, c, i_m, i_v, D, step):
    """Fetch the operands of the tile at [i_m, i_v]. Returns the next step."""
    ring_e, ring_c, full, empty = ring
    for i_k in range(0, D, BK):
        slot, use = step % STAGES, step // STAGES
        mbarrier.wait(empty.index(slot), (use & 1) ^ 1)
        mbarrier.expect(full.index(slot), e.block_type.nbytes + c.block_type.nbytes)
        async_load(e, [i_m, i_k], full.index(slot), ring_e.index(slot))
        async_load(c, [i_v, i_k], full.index(slot), ring_c.index(slot))
        step += 1
    return step


@gluon.jit
def multiply(ring, D, step, HALF: gl.constexpr):
    """e @ c.T for one half of a tile's rows, as four tensors [ROWS, QUARTER] from left to right, and the next step."""
    ring_e, ring_c, full, empty = ring
    dot = gl.zeros([ROWS, BN], gl.float32, TILE_LAYOUT)
    for i_k in range(0, D, BK):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        half = ring_e.index(slot).slice(HALF * ROWS, ROWS)
        dot = hopper.warpgroup_mma(half, ring_c.index(slot).permute((1, 0)), dot, is_async=True)
        # One product stays under way; the one before it has read its operands.
        dot = hopper.warpgroup_mma_wait(1, deps=(dot,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i_k > 0)
        step += 1
    dot = hopper.warpgroup_mma_wait(0, deps=(dot,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    left, right = _halves(dot)
    q0, q1 = _halves(left)
    q2, q3 = _halves(right)
    return (_quarter(q0), _quarter(q1), _quarter(q2), _quarter(q3)), step


@gluon.jit
def _halves(x):
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _quarter(x):
    """The elements are in their registers already."""
    return gl.convert_layout(x, QUARTER_LAYOUT, assert_trivial=True)


@gluon.jit
def new_buffers(panel):
    return gl.allocate_shared_memory(panel.dtype, [2, ROWS, QUARTER], panel.layout)


@gluon.jit
def store(panel, i_m, i_v, buffer, x):
    """panel[i_m : i_m + ROWS, i_v : i_v + QUARTER] = x, rounded. This store and the one before are still under way."""
    tma.store_wait(1)
    buffer.store(x.to(panel.dtype))
    hopper.fence_async_shared()
    async_store(panel, [i_m, i_v], buffer)
