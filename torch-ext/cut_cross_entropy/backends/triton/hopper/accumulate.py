"""out += panel.T @ e over few rows, by specialised warps: what a small block of tokens adds to dC.

Its products are short and out is large: what counts is that out is read and written without a pause. A program keeps
the panel of 128 classes in shared memory and goes along D with it. One warp loads operands, another the tiles of out
that come next; two warpgroups, of 64 classes each, multiply, add in fp32 and store. Each tile of out is one program's.

Of 128 and 256 rows this takes what memory needs for out; of more, e is read from L2 too often for that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .pipeline import (
    BK,
    HALF_LAYOUT,
    QUARTER,
    QUARTER_LAYOUT,
    ROWS,
    STAGES,
    async_load,
    async_store,
    new_barriers,
    operand,
    split_columns,
)

# Classes and columns of a tile of out. Those of one warpgroup come and go in two buffers, and the next ones meanwhile.
CLASSES, COLUMNS, SETS = gl.constexpr(128), gl.constexpr(128), gl.constexpr(2)
MOST_ROWS = 384  # whose panel leaves room for the other buffers
ADDING_WARPS, ADDING_REGISTERS = gl.constexpr([4, 1, 1]), gl.constexpr([232, 24, 24])


def accumulate_operands(panel, e, out):
    """Descriptors of the blocks in which these are loaded and out is stored."""
    classes, columns = ROWS.value, COLUMNS.value
    return operand(panel, BK.value, classes), operand(e, BK.value, columns), operand(out, classes, QUARTER.value)


@gluon.jit
def load_operands(panel, e, columns, rows, place, STEPS: gl.constexpr):
    """The panel of 128 classes once for all their tiles, e for every tile."""
    ring_c, full_c, empty_c = columns
    ring_e, full_e, empty_e = rows
    first, last, across = place
    step, turn = 0, 0
    for t in range(first, last):
        i_v, i_d = t // across * CLASSES, t % across * COLUMNS
        new = (t == first) | (i_d == 0)
        for k in gl.static_range(STEPS):
            if new:
                mbarrier.wait(empty_c.index(k), (turn & 1) ^ 1)
                mbarrier.expect(full_c.index(k), 2 * panel.block_type.nbytes)
                for g in gl.static_range(2):
                    async_load(panel, [k * BK, i_v + g * ROWS], full_c.index(k), ring_c.index(2 * k + g))
            slot = step % STAGES
            mbarrier.wait(empty_e.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full_e.index(slot), e.block_type.nbytes)
            async_load(e, [k * BK, i_d], full_e.index(slot), ring_e.index(slot))
            step += 1
        turn += new.to(gl.int32)


@gluon.jit
def load_sums(out, sums, place):
    """Tiles of out as they are, as soon as there are buffers for them."""
    buffers, full, empty = sums
    first, last, across = place
    for t in range(first, last):
        use = t - first
        for q in gl.static_range(4):
            i = use % SETS * 4 + q
            mbarrier.wait(empty.index(i), ((use // SETS) & 1) ^ 1)
            mbarrier.expect(full.index(i), out.block_type.nbytes)
            i_v, i_d = t // across * CLASSES + q // 2 * ROWS, t % across * COLUMNS + q % 2 * QUARTER
            async_load(out, [i_v, i_d], full.index(i), buffers.index(i))


@gluon.jit
def add_products(WARPGROUP: gl.constexpr, out, columns, rows, sums, place, STEPS: gl.constexpr):
    """The 64 classes of one warpgroup in every tile."""
    ring_c, full_c, empty_c = columns
    ring_e, full_e, empty_e = rows
    buffers, full, empty = sums
    first, last, across = place
    step, turn = 0, 0
    for t in range(first, last):
        use, leaving = t - first, (t == last - 1) | (t % across == across - 1)
        dot = gl.zeros([ROWS, COLUMNS], gl.float32, HALF_LAYOUT)
        for k in gl.static_range(STEPS):
            slot = step % STAGES
            mbarrier.wait(full_c.index(k), turn & 1)
            mbarrier.wait(full_e.index(slot), (step // STAGES) & 1)
            dot = hopper.warpgroup_mma(
                ring_c.index(2 * k + WARPGROUP).permute((1, 0)), ring_e.index(slot), dot, is_async=True
            )  # fmt: skip
            if k > 0:
                dot = hopper.warpgroup_mma_wait(1, deps=(dot,))
                mbarrier.arrive(empty_e.index((step + STAGES - 1) % STAGES))
                mbarrier.arrive(empty_c.index(k - 1), pred=leaving)
            step += 1
        dot = hopper.warpgroup_mma_wait(0, deps=(dot,))
        mbarrier.arrive(empty_e.index((step + STAGES - 1) % STAGES))
        mbarrier.arrive(empty_c.index(STEPS - 1), pred=leaving)
        turn += leaving.to(gl.int32)
        # The stores of the tile before have had this tile's products to read their buffers in.
        tma.store_wait(0)
        for h in gl.static_range(2):
            mbarrier.arrive(empty.index((use + 1) % SETS * 4 + WARPGROUP * 2 + h), pred=use > 0)
        products = split_columns(dot, QUARTER_LAYOUT)
        for h in gl.static_range(2):
            i = use % SETS * 4 + WARPGROUP * 2 + h
            mbarrier.wait(full.index(i), (use // SETS) & 1)
            x = buffers.index(i).load(QUARTER_LAYOUT).to(gl.float32) + products[h]
            buffers.index(i).store(x.to(out.dtype))
            hopper.fence_async_shared()
            i_v, i_d = t // across * CLASSES + WARPGROUP * ROWS, t % across * COLUMNS + h * QUARTER
            async_store(out, [i_v, i_d], buffers.index(i))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["V"])
def hopper_accumulate_kernel(panel, e, out, V, D, STEPS: gl.constexpr):
    """out [V, D] += panel.T @ e, of at most STEPS * BK rows, with every element rounded once."""
    # Each with the barriers that say full and empty.
    columns = (
        gl.allocate_shared_memory(panel.dtype, [2 * STEPS, BK, ROWS], panel.layout),
        new_barriers(STEPS, 1), new_barriers(STEPS, 2),
    )  # fmt: skip
    rows = (
        gl.allocate_shared_memory(e.dtype, [STAGES, BK, COLUMNS], e.layout),
        new_barriers(STAGES, 1), new_barriers(STAGES, 2),
    )  # fmt: skip
    sums = (
        gl.allocate_shared_memory(out.dtype, [4 * SETS, ROWS, QUARTER], out.layout),
        new_barriers(4 * SETS, 1), new_barriers(4 * SETS, 1),
    )  # fmt: skip
    hopper.fence_async_shared()
    # A range of tiles for each program, along D first; ranges differ by one tile at most.
    across = gl.cdiv(D, COLUMNS)
    tiles = (gl.cdiv(V, CLASSES) * across).to(gl.int64)
    i, programs = gl.program_id(0), gl.num_programs(0)
    place = ((tiles * i // programs).to(gl.int32), (tiles * (i + 1) // programs).to(gl.int32), across)
    gl.warp_specialize(
        [
            (add_products, (0, out, columns, rows, sums, place, STEPS)),
            (add_products, (1, out, columns, rows, sums, place, STEPS)),
            (load_operands, (panel, e, columns, rows, place, STEPS)),
            (load_sums, (out, sums, place)),
        ],
        ADDING_WARPS,
        ADDING_REGISTERS,
    )  # fmt: skip
