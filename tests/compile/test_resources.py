"""Every kernel, compiled ahead of time for every architecture: it fits in shared memory and does not spill.

Options multiply, and a compilation takes seconds. On 9.0 every combination that differs in its epilogue is compiled;
elsewhere the plain kernels and the heaviest ones. CCE_COMPILE_ALL=1 compiles every combination everywhere.
"""

import itertools
import os
from typing import NamedTuple

import pytest
import torch
from recorded import Recorder, compile_for

KB = 1024
SPILL = 64  # bytes a thread

# Architecture -> row of the tile table and bytes of shared memory that a block may have.
LIMITS = {
    80: ("sm80", 163 * KB),
    86: ("sm86", 99 * KB),
    89: ("sm86", 99 * KB),
    90: ("sm90", 227 * KB),
    100: ("sm100", 227 * KB),
    120: ("sm86", 99 * KB),
    "gfx90a": ("gfx9", 64 * KB),
    "gfx942": ("gfx9", 64 * KB),
}


class Options(NamedTuple):
    """What changes the kernels' code. Smoothing belongs to the loss, statistics to `linear_token_stats`."""

    bias: bool = False
    softcap: bool = False  # one of 30, whose tanh is the cheap one for 16-bit inputs
    large: bool = False  # one of 50
    smooth: bool = False
    weight: bool = False
    stats: bool = False

    def __str__(self):
        return "+".join(name for name, on in self._asdict().items() if on) or "plain"


PLAIN = Options()
SOFTCAP = Options(softcap=True)
LARGE = Options(bias=True, large=True)
BIAS_SOFTCAP = Options(bias=True, softcap=True)
SMOOTH = Options(bias=True, smooth=True, weight=True)
STATS = Options(bias=True, stats=True)
SMOOTH_SOFTCAP = SMOOTH._replace(softcap=True)
STATS_SOFTCAP = STATS._replace(softcap=True)
SMOOTH_LARGE = SMOOTH._replace(large=True)
STATS_LARGE = STATS._replace(large=True)


# The fold relative to the target's logit where nothing more is asked for, its second look at blocks where that went
# wrong, the list of valid rows, and the fold that writes the panel of `single_pass`. Those of specialised warps on 9.0.
KERNELS = {
    "fold": {"LISTED": False, "RETRY": False, "STORE": False},
    "fold-retry": {"RETRY": True},
    "fold-listed": {"LISTED": True},
    "fold-store": {"STORE": True},
    "dlogits": {},
    "dlogits-single": {},
    "hopper_fold": {"STORE": False, "BM": 128},
    "hopper_fold-tall": {"BM": 192},
    "hopper_fold-store": {"STORE": True},
    "hopper_online": {},
    "hopper_dlogits": {},
}
SINGLE = ("fold-store", "dlogits-single", "hopper_fold-store")


class Case(NamedTuple):
    arch: int | str
    kernel: str  # one of KERNELS
    options: Options
    dtype: torch.dtype = torch.bfloat16
    d: int = 128  # 127: rows of no descriptor, and a masked last block of the hidden size

    @property
    def specialised(self):
        return self.kernel.startswith("hopper")

    def __str__(self):
        name = f"{self.arch}-{self.kernel}-{self.options}-{str(self.dtype).removeprefix('torch.')}"
        return name if self.d == 128 else f"{name}-unaligned"


def every_case():
    flags = (
        Options(bias, *softcap, *kind)
        for bias in (False, True)
        for softcap in ((False, False), (True, False), (False, True))
        for kind in ((False, False, False), (True, False, False), (True, True, False), (False, False, True))
    )
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for options in flags:
        plain = not (options.smooth or options.stats)
        for arch, kernel, dtype, d in itertools.product(LIMITS, KERNELS, dtypes, (128, 127)):
            case = Case(arch, kernel, options, dtype, d)
            if case.specialised and (arch != 90 or dtype == torch.float32 or d == 127):
                continue
            if kernel == "hopper_fold-tall" and options.bias:
                continue
            online = options.stats or options.smooth and (options.softcap or options.large)
            if kernel == "hopper_online" and not online:
                continue
            if plain or kernel in ("fold", "fold-listed", "dlogits", "hopper_dlogits", "hopper_online"):
                if kernel not in SINGLE or dtype != torch.float16:
                    yield case


def cases():
    """The costly ones first, so that the last of them does not run alone."""
    for options in (SMOOTH_LARGE, STATS_LARGE, SMOOTH_SOFTCAP, STATS_SOFTCAP, PLAIN):
        for kernel in ("dlogits", "fold"):
            yield Case(90, kernel, options)
    for options in (SMOOTH_LARGE, STATS_LARGE, BIAS_SOFTCAP, LARGE, STATS, PLAIN):
        yield Case(90, "hopper_dlogits", options)
    for options in (SMOOTH_LARGE, STATS_LARGE, SMOOTH_SOFTCAP, STATS):
        yield Case(90, "hopper_online", options)
    for options in (SOFTCAP, LARGE._replace(bias=False), PLAIN):
        yield Case(90, "hopper_fold-tall", options)
    for options in (BIAS_SOFTCAP, LARGE, PLAIN):
        yield Case(90, "hopper_fold", options)
        yield Case(90, "hopper_fold-store", options)
    for options in (STATS_LARGE, SMOOTH_SOFTCAP, PLAIN):
        yield Case(90, "fold-listed", options)
    for arch in (100, 120, 80, 86, "gfx942"):
        yield Case(arch, "fold", STATS_LARGE)
        yield Case(arch, "dlogits", SMOOTH_LARGE)
    for arch in (100, 80):
        yield Case(arch, "fold-listed", SMOOTH_SOFTCAP)
        yield Case(arch, "fold", PLAIN)
        yield Case(arch, "dlogits", PLAIN)
    yield Case(90, "dlogits", SMOOTH_SOFTCAP, torch.float16)
    yield Case(90, "hopper_dlogits", SMOOTH_SOFTCAP, torch.float16)
    yield Case(80, "dlogits", SMOOTH_LARGE, d=127)
    for arch in (90, 80, 86, "gfx942"):
        yield Case(arch, "fold", STATS_LARGE, d=127)
    for arch in (90, 80):
        yield Case(arch, "fold", STATS_LARGE, torch.float32)
        yield Case(arch, "dlogits", SMOOTH_LARGE, torch.float32)
        yield Case(arch, "fold-store", LARGE, torch.float32)
        yield Case(arch, "fold-store", LARGE, d=127)
        yield Case(arch, "fold-store", BIAS_SOFTCAP, d=127)
        yield Case(arch, "fold-retry", PLAIN)
    for arch in (90, 100, 120, 80, 86, "gfx90a", "gfx942"):
        yield Case(arch, "fold-store", LARGE)
    for arch in (90, 100, 80, "gfx942"):
        yield Case(arch, "fold-store", BIAS_SOFTCAP)
        yield Case(arch, "fold-store", PLAIN)
    yield Case(90, "dlogits-single", LARGE)


CASES = list(every_case() if os.environ.get("CCE_COMPILE_ALL") == "1" else cases())


def problem_of(recorder, case):
    n, v = 384 if case.kernel.endswith("tall") else 256, 512
    return recorder.problem.Problem(
        e=torch.zeros(n, case.d, dtype=case.dtype), c=torch.zeros(v, case.d, dtype=case.dtype),
        targets=torch.zeros(n, dtype=torch.int64), bias=torch.zeros(v) if case.options.bias else None,
        weight=torch.zeros(v) if case.options.weight else None, ignore_index=-100,
        softcap={(True, False): 30.0, (False, True): 50.0}.get(case.options[1:3]), scale=1.5, temperature=0.7,
    )  # fmt: skip


def step(recorder, case, live=None):
    problem, upstream = problem_of(recorder, case), ["nll"]
    live = len(problem.targets) if live is None else live
    if case.options.smooth:
        upstream += ["rest", "smooth"]
    if case.options.stats:
        upstream += ["rest", "entropy"]
    if case.kernel in SINGLE:
        return recorder.sweep(LIMITS[case.arch][0], problem, live, case.specialised)
    stats = case.options.stats
    wanted = {"want_smooth": case.options.smooth, "want_entropy": stats, "want_prediction": stats}
    return recorder.step(LIMITS[case.arch][0], problem, live, upstream, case.specialised, **wanted)


def launch_of(recorder, case):
    """The case's kernel among those of one step, or of one sweep of `single_pass`."""
    found = step(recorder, case)[f"{case.kernel.partition('-')[0]}_kernel"]
    return next(launch for launch in found if KERNELS[case.kernel].items() <= launch.constants.items())


def check(launch, arch):
    found, limit = compile_for(launch, arch), LIMITS[arch][1]
    assert found.shared <= limit, f"{found.shared} bytes of shared memory, {limit} available"
    assert found.spilled <= SPILL, f"{found.spilled} bytes of registers spilled, {SPILL} allowed"
    assert not found.early, "a buffer is given back before the whole group has waited for its product"
    assert not found.serialized, "the first use of an accumulator lies inside a branch: matrix products wait in turn"


@pytest.fixture
def recorder(cce, monkeypatch):
    return Recorder(cce.__name__, monkeypatch)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fits(recorder, case):
    if case.kernel == "hopper_fold-tall" and not recorder.configs.KEEPS_TALL:
        pytest.skip("this Triton spills tall tiles, which are not used with it")
    check(launch_of(recorder, case), case.arch)


@pytest.mark.parametrize("arch", [80, 90, "gfx942"])
@pytest.mark.parametrize("kernel", ["select", "column_sum", "offset", "merge", "compact", "expand"])
def test_row_kernels_fit(recorder, kernel, arch):
    launches = step(recorder, Case(arch, "fold", SMOOTH, torch.float16), live=100)
    check(launches[f"{kernel}_kernel"][0], arch)


@pytest.mark.parametrize("arch", [80, 90, "gfx942"])
@pytest.mark.parametrize("kernel", ["offset", "factor", "expand", "scale"])
def test_row_kernels_of_a_sweep_fit(recorder, kernel, arch):
    launches = step(recorder, Case(arch, "fold-store", BIAS_SOFTCAP), live=100)
    check(launches[f"{kernel}_kernel"][0], arch)


@pytest.mark.parametrize("arch", [80, 90, "gfx942"])
@pytest.mark.parametrize("kernel", ["take_targets", "put_targets", "add_targets"])
def test_kernels_of_rounded_sums_fit(recorder, kernel, arch):
    launches = recorder.rounded_sums(LIMITS[arch][0], problem_of(recorder, Case(arch, "fold-store", PLAIN)))
    check(launches[f"{kernel}_kernel"][0], arch)


@pytest.mark.parametrize("rows", [128, 256, 384])
def test_short_products_fit(recorder, rows):
    (launch,) = recorder.added("sm90", rows, torch.bfloat16)["hopper_accumulate_kernel"]
    check(launch, 90)
    assert list(launch.constants) == launch.kernel.arg_names[len(launch.args) :]


def test_longer_products_are_left_to_cublas(recorder):
    assert not recorder.added("sm90", 385, torch.bfloat16)


def test_a_spill_is_seen(recorder):
    launch = launch_of(recorder, Case(80, "fold", PLAIN))
    crowded = launch._replace(constants=launch.constants | {"num_warps": 2})
    with pytest.raises(AssertionError, match="registers spilled"):
        check(crowded, 80)


def test_constants_come_in_the_order_of_the_signature(recorder):
    """A compiled kernel is run again with its constants by position."""
    cases = [Case(90, "fold", options) for options in (PLAIN, SMOOTH_SOFTCAP, STATS_SOFTCAP)]
    kernels = ("fold-store", "hopper_fold", "hopper_fold-store")
    cases += [Case(90, "hopper_online", options) for options in (SMOOTH_LARGE, STATS)]
    for case in (*cases, *[Case(90, kernel, BIAS_SOFTCAP) for kernel in kernels]):
        for launch in itertools.chain(*step(recorder, case, live=100).values()):
            names = [name for name in launch.constants if not name.startswith("num_")]
            assert names == launch.kernel.arg_names[len(launch.args) :]


def test_tuned_tiles_are_kept(recorder):
    """128 x 256 runs at the speed of cuBLAS on 9.0: the plain kernels must not lose it to an option's needs."""
    for dtype in (torch.bfloat16, torch.float16):
        for kernel, stages in (("fold", 4), ("dlogits", 3), *[("fold-store", 3)] * (dtype == torch.bfloat16)):
            constants = launch_of(recorder, Case(90, kernel, PLAIN, dtype)).constants
            tile = [constants[name] for name in ("BM", "BN", "BK", "num_warps", "num_stages")]
            assert tile == [128, 256, 64, 8, stages]
