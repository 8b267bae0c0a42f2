"""Compiling, without a GPU, what the Triton backend would launch.

`record` runs the schedule on CPU tensors with a chosen row of the tile table while `launch` only notes its arguments;
`compile_for` hands one noted launch to the compiler for a target and reads the assembler's resource report.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


def _argument(value, specialize):
    """(type, constant, attributes) of one run-time argument, as the launcher would specialise it."""
    if value is None:
        return "constexpr", None, None
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}[{', '.join(map(str, value.block_shape))}]>", ..., None
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", ..., [["tt.divisibility", 16]] if value.data_ptr() % 16 == 0 else None
    if isinstance(value, float):
        return "fp32", ..., None
    if specialize and value == 1:
        return "constexpr", 1, None
    return "i32", ..., [["tt.divisibility", 16]] if specialize and value % 16 == 0 else None


def source_of(kernel, args, constants):
    signature, constexprs, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args)):
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
    return ASTSource(kernel, signature, constexprs, attributes), options


def compile_for(launch, backend, arch, warp_size=32):
    kernel, args, constants = launch
    source, options = source_of(kernel, args, constants)
    return triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=options)


def resources(compiled, arch):
    """(registers, spilled bytes) by ptxas's own report for the compiled PTX."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin" / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    suffix = "a" if arch >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        report = subprocess.run(
            [ptxas, "-v", f"--gpu-name=sm_{arch}{suffix}", file.name, "-o", "/dev/null"], capture_output=True, text=True
        ).stderr
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
