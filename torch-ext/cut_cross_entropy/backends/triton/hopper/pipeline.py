"""Products of tiles by specialised warps, in Gluon: one warp loads, two or three warpgroups multiply.

After its last product a warpgroup turns 64 x 256 dot products into exponentials, some 2000 clocks in which it has no
use for the tensor cores. Each has 64 rows of every tile and waits for nothing but its operands: while one computes, the
tensor cores go on with another's product, and the operands of the next tile are on their way.

The operands pass through a ring of STAGES buffers, of which `step` counts the uses. `full` is signalled by the copies,
`empty` by each warpgroup when its products have read a buffer.

Three warpgroups load 22 % less for the same products, but leave a thread 160 registers: enough for the plain fold
alone, and for it only an eighth of the columns at a time.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..configs import KEEPS_TALL, Tile

# As Triton 3.8 and up call them, and what they were before.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

TILE = Tile(BM=128, BN=256, BK=64, warps=4, stages=4)
TALL = TILE._replace(BM=192)
BM, BN, BK, _, STAGES = map(gl.constexpr, TILE)
# Rows of a warpgroup. Its results leave through two buffers, a quarter of their columns at a time.
ROWS, QUARTER = gl.constexpr(64), gl.constexpr(64)


def _layout(columns):
    return gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]))


TILE_LAYOUT, HALF_LAYOUT, QUARTER_LAYOUT, EIGHTH_LAYOUT = (_layout(TILE.BN // k) for k in (1, 2, 4, 8))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, QUARTER_LAYOUT.value))
COLUMN_LAYOUT = gl.constexpr(gl.SliceLayout(0, QUARTER_LAYOUT.value))
# Warps and registers a thread of the other warpgroups and of the loading warp. The first one is the kernel's own.
WORKER_WARPS, WORKER_REGISTERS = gl.constexpr([4, 1]), gl.constexpr([240, 24])
TALL_WARPS, TALL_REGISTERS = gl.constexpr([4, 4, 1]), gl.constexpr([160, 160, 24])


@functools.cache
def _shared_layout(rows, columns, dtype):
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def operand(t, rows, columns):
    """A descriptor of [rows, columns] blocks."""
    layout = _shared_layout(rows, columns, t.dtype)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns], layout)


def operands(e, c, panel):
    """Descriptors of the blocks in which e and c are loaded and a panel, if there is one, is stored."""
    panel = None if panel is None else operand(panel, ROWS.value, QUARTER.value)
    return operand(e, ROWS.value, TILE.BK), operand(c, TILE.BN, TILE.BK), panel


def fold_tile(n, plain):
    """TALL for a plain fold, but where it would leave more of its rows empty than a hundredth of all."""
    return TALL if KEEPS_TALL and plain and -n % TALL.BM <= n // 100 else TILE


def present(other, *tensors):
    """Partitions of warps take no None: `other` in place of what is absent and will not be read."""
    return [other if t is None else t for t in tensors]


@gluon.jit
def new_ring(e, c, WARPGROUPS: gl.constexpr):
    """(buffers of e, of c, full, empty)"""
    ring_e = gl.allocate_shared_memory(e.dtype, [STAGES * WARPGROUPS, ROWS, BK], e.layout)
    ring_c = gl.allocate_shared_memory(c.dtype, [STAGES, BN, BK], c.layout)
    full, empty = new_barriers(STAGES, 1), new_barriers(STAGES, WARPGROUPS)
    hopper.fence_async_shared()
    return ring_e, ring_c, full, empty


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def load(ring, e, c, i_m, i_v, D, step, WARPGROUPS: gl.constexpr):
    """Fetch the operands of the tile at [i_m, i_v]. Returns the next step."""
    ring_e, ring_c, full, empty = ring
    for i_k in range(0, D, BK):
        slot, use = step % STAGES, step // STAGES
        mbarrier.wait(empty.index(slot), (use & 1) ^ 1)
        mbarrier.expect(full.index(slot), WARPGROUPS * e.block_type.nbytes + c.block_type.nbytes)
        for g in gl.static_range(WARPGROUPS):
            async_load(e, [i_m + g * ROWS, i_k], full.index(slot), ring_e.index(slot * WARPGROUPS + g))
        async_load(c, [i_v, i_k], full.index(slot), ring_c.index(slot))
        step += 1
    return step


@gluon.jit
def multiply(ring, D, step, WARPGROUP: gl.constexpr):
    """e @ c.T for the rows of one of two warpgroups, [ROWS, QUARTER] each from left to right, and the next step."""
    ring_e, ring_c, full, empty = ring
    dot = gl.zeros([ROWS, BN], gl.float32, TILE_LAYOUT)
    for i_k in range(0, D, BK):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        dot = hopper.warpgroup_mma(
            ring_e.index(slot * 2 + WARPGROUP), ring_c.index(slot).permute((1, 0)), dot, is_async=True
        )  # fmt: skip
        # One product stays under way; the one before it has read its operands.
        dot = hopper.warpgroup_mma_wait(1, deps=(dot,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i_k > 0)
        step += 1
    dot = hopper.warpgroup_mma_wait(0, deps=(dot,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    left, right = _halves(dot)
    q0, q1 = split_columns(left, QUARTER_LAYOUT)
    q2, q3 = split_columns(right, QUARTER_LAYOUT)
    return (q0, q1, q2, q3), step


@gluon.jit
def multiply_tall(ring, D, step, WARPGROUP: gl.constexpr):
    """The same for one of three warpgroups, in eighths. One instruction for all columns would need more registers than
    the compiler gives a kernel of so many warps: there are two.
    """
    ring_e, ring_c, full, empty = ring
    left = gl.zeros([ROWS, BN // 2], gl.float32, HALF_LAYOUT)
    right = gl.zeros([ROWS, BN // 2], gl.float32, HALF_LAYOUT)
    for i_k in range(0, D, BK):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        rows, columns = ring_e.index(slot * 3 + WARPGROUP), ring_c.index(slot)
        left = hopper.warpgroup_mma(rows, columns.slice(0, BN // 2).permute((1, 0)), left, is_async=True)
        right = hopper.warpgroup_mma(rows, columns.slice(BN // 2, BN // 2).permute((1, 0)), right, is_async=True)
        left, right = hopper.warpgroup_mma_wait(2, deps=(left, right))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i_k > 0)
        step += 1
    left, right = hopper.warpgroup_mma_wait(0, deps=(left, right))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    q0, q1 = _halves(left)
    q2, q3 = _halves(right)
    e0, e1 = split_columns(q0, EIGHTH_LAYOUT)
    e2, e3 = split_columns(q1, EIGHTH_LAYOUT)
    e4, e5 = split_columns(q2, EIGHTH_LAYOUT)
    e6, e7 = split_columns(q3, EIGHTH_LAYOUT)
    return (e0, e1, e2, e3, e4, e5, e6, e7), step


@gluon.jit
def _halves(x):
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def split_columns(x, layout: gl.constexpr):
    """The left and the right half of x. Their elements are in their registers already."""
    left, right = _halves(x)
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def new_buffers(panel):
    """Two for each of two warpgroups."""
    return gl.allocate_shared_memory(panel.dtype, [4, ROWS, QUARTER], panel.layout)


@gluon.jit
def store(panel, i_m, i_v, buffer, x):
    """panel[i_m : i_m + ROWS, i_v : i_v + QUARTER] = x, rounded. This store and the one before are still under way."""
    tma.store_wait(1)
    buffer.store(x.to(panel.dtype))
    hopper.fence_async_shared()
    async_store(panel, [i_m, i_v], buffer)
