"""Compiling, without a GPU, what the Triton backend would launch.

`Recorder` runs the primitives on CPU tensors with a chosen row of the tile table while `launch` only notes its
arguments; `compile_for` hands one noted launch to the compiler for a target and reads the assembler's resource report.
"""

import contextlib
import importlib
import io
import itertools
import re
import sys
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import nvidia as gluon
from triton.experimental.gluon._runtime import GluonASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Launch(NamedTuple):
    kernel: object
    args: tuple
    constants: dict


class Resources(NamedTuple):
    shared: int  # bytes of shared memory per block
    spilled: int  # bytes of registers per thread that went to local memory
    serialized: bool = False  # the assembler had to wait for every matrix product (wgmma)
    early: bool = False  # one thread of a group gives a buffer back before all of them have waited for their product


class Recorder:
    """The Triton backend of a loaded kernel module, run on CPU tensors with its launches noted instead of made."""

    def __init__(self, name, patch):
        self.backend, self.configs, self.problem, self.recompute, self.single_pass = (
            importlib.import_module(f"{name}.{module}")
            for module in (
                "backends.triton", "backends.triton.configs", "problem", "schedules.recompute", "schedules.single_pass"
            )
        )  # fmt: skip
        inside = [module for name, module in sys.modules.items() if name.startswith(f"{self.backend.__name__}.")]
        for module in inside:
            if hasattr(module, "launch"):
                patch.setattr(module, "launch", self._note)
        self._patch = patch

    def _note(self, kernel, programs, device, *args, compiled=None, tape=None, **constants):
        self._launches.append(Launch(kernel, args, constants))
        if kernel.__name__ == "select_kernel":
            _, rows, count, in_range, *_ = args
            torch.arange(len(rows), out=rows), count.fill_(self._live), in_range.fill_(1)

    def _begin(self, row, live, specialised):
        config = self.configs.CONFIGS[row]._replace(specialised=specialised)
        self._patch.setattr(self.configs, "config_of", lambda device: config)
        self._launches, self._live = [], live

    def _by_name(self):
        launches = {}
        for launch in self._launches:
            launches.setdefault(launch.kernel.__name__, []).append(launch)
        return launches

    def step(self, row, problem, live, upstream=("nll",), specialised=False, **wanted):
        """Launches by kernel name of one forward and backward with the tiles of this row of CONFIGS."""
        self._begin(row, live, specialised)
        gradient = torch.ones(()).expand(problem.e.shape[0])
        upstream = self.problem.RowGradients(
            *(gradient if name in upstream else None for name in self.problem.RowGradients._fields)
        )
        fold = self.recompute.forward(self.backend, problem, **wanted)
        self.recompute.backward(self.backend, problem, fold, upstream, self._gradients_of(problem), None)
        return self._by_name()

    def sweep(self, row, problem, live, specialised=False):
        """The same of a penalized, smoothed mean by `single_pass`, and of an upstream gradient that is not 1."""
        self._begin(row, live, specialised)
        coefficients, gradients = [torch.ones(problem.e.shape[0])] * 3, self._gradients_of(problem)
        self.single_pass.loss_and_gradients(self.backend, problem, *coefficients, False, gradients, None, "single_pass")
        self.backend.scale(torch.ones(()), gradients.de, gradients.dc, gradients.dbias)
        return self._by_name()

    def rounded_sums(self, row, problem):
        """The same of what `single_pass` does to targets, by blocks and at the end, where dC is summed in 16 bits."""
        self._begin(row, 0, False)
        n, v = problem.e.shape[0], problem.c.shape[0]
        frequent, vectors, rows = torch.zeros(v, dtype=torch.int8), torch.zeros(2, n), torch.arange(n)
        self.backend.take_targets(problem, torch.zeros(n, v, dtype=problem.e.dtype), frequent, *vectors)()
        self.backend.add_targets(problem, rows.int(), frequent, vectors[1], torch.empty_like(problem.c))
        return self._by_name()

    def added(self, row, rows, dtype):
        """The same of what the products of so many tokens are added to, in their own dtype."""
        self._begin(row, 0, True)
        panel, e, out = (torch.zeros(shape, dtype=dtype) for shape in ((rows, 576), (rows, 136), (576, 136)))
        self.backend.accumulate(panel.t(), e, out, first=False)
        return self._by_name()

    def _gradients_of(self, problem):
        de = torch.empty_like(problem.e, memory_format=torch.contiguous_format)
        return self.problem.Gradients(de, torch.empty_like(problem.c), None)


def _argument(value, specialize):
    """(type, constant or ... for none, attributes) of one run-time argument, as the launcher would specialise it."""
    if value is None:
        return "constexpr", None, None
    if isinstance(value, (TensorDescriptor, gluon.hopper.TensorDescriptor)):
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}{layout}>", ..., None
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", ..., [["tt.divisibility", 16]] if value.data_ptr() % 16 == 0 else None
    if isinstance(value, float):
        return "fp32", ..., None
    if specialize and value == 1:
        return "constexpr", 1, None
    return "i32", ..., [["tt.divisibility", 16]] if specialize and value % 16 == 0 else None


def source_of(kernel, args, constants):
    signature, constexprs, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=False)):
        kind, constant, attribute = _argument(value, not parameter.do_not_specialize)
        signature[parameter.name] = kind
        if constant is not ...:
            constexprs[(i,)] = constant
        if attribute:
            attributes[(i,)] = attribute
    options = {name: constants[name] for name in constants if name.startswith("num_")}
    for name, value in constants.items():
        if name not in options:
            signature[name] = "constexpr"
            constexprs[(kernel.arg_names.index(name),)] = value
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(kernel, signature, constexprs, attributes), options


def given_back_early(ptx):
    """The barrier before an arrival is the compiler's to insert: whether some arrival follows a wait without one."""
    order = re.findall(r"wgmma\.wait_group|\bbar\.sync|mbarrier\.arrive(?!\.expect)", ptx)
    return any(pair == ("wgmma.wait_group", "mbarrier.arrive") for pair in itertools.pairwise(order))


def compile_for(launch, arch):
    """Resources of one launch compiled for an architecture: 90 is sm_90, "gfx942" is AMD's."""
    backend = "hip" if isinstance(arch, str) else "cuda"
    kernel, args, constants = launch
    source, options = source_of(kernel, args, constants)
    target = GPUTarget(backend, arch, 32 if backend == "cuda" else 64)
    # ptxas reports spills in its log alone, and a kernel from the cache has none.
    knobs, log = triton.knobs, io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    if backend == "cuda":
        stored, loaded = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue()).groups()
        spilled, serialized = max(int(stored), int(loaded)), "serialized" in log.getvalue()
        return Resources(compiled.metadata.shared, spilled, serialized, given_back_early(compiled.asm["ptx"]))
    # A spilled vector register is 4 bytes of each lane.
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"]).group(1)
    return Resources(compiled.metadata.shared, 4 * int(spilled))
