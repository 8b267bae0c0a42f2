"""The loss beside its materialized definition, for `kernels benchmark .` (after `make build`).

Sizes follow the device: a Llama-3-like head on a GPU, a small one on a CPU. Each workload's result is checked against
F.cross_entropy over fp32 logits before it is timed.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class LinearCrossEntropyBenchmark(Benchmark):
    seed = 0

    def setup(self, ignored: float = 0.0, requires_grad: bool = True) -> None:
        on_cpu = self.device == "cpu"
        n, v, d = (256, 8192, 128) if on_cpu else (8192, 128256, 2048)
        dtype = torch.float32 if on_cpu else torch.bfloat16
        self.e = torch.randn(n, d, device=self.device, dtype=dtype)
        self.c = torch.randn(v, d, device=self.device, dtype=dtype) / d**0.5
        self.targets = torch.randint(v, (n,), device=self.device)
        self.targets[torch.rand(n, device=self.device) < ignored] = -100
        self.inputs = (self.e.requires_grad_(requires_grad), self.c.requires_grad_(requires_grad))

    def materialized(self) -> torch.Tensor:
        return F.cross_entropy((self.e @ self.c.T).float(), self.targets)

    def loss(self) -> torch.Tensor:
        return self.kernel.linear_cross_entropy(self.e, self.c, self.targets)

    def gradient_norms(self, loss: torch.Tensor) -> torch.Tensor:
        """One number a gradient, of order 1 whatever the size: what `verify_*` compares within 1e-2."""
        return torch.stack([grad.float().norm() for grad in torch.autograd.grad(loss, self.inputs)])

    # The loss alone, as in evaluation.

    def setup_forward(self) -> None:
        self.setup(requires_grad=False)

    def benchmark_forward(self) -> None:
        self.out = self.loss()

    def verify_forward(self) -> torch.Tensor:
        return self.materialized()

    # A training step's share: loss, dE and dC.

    def setup_training(self) -> None:
        self.setup()

    def benchmark_training(self) -> None:
        self.out = self.gradient_norms(self.loss())

    def verify_training(self) -> torch.Tensor:
        return self.gradient_norms(self.materialized())

    # The same where prompts are masked: nine targets of ten are ignored, wherever they lie.

    def setup_masked_training(self) -> None:
        self.setup(ignored=0.9)

    def benchmark_masked_training(self) -> None:
        self.out = self.gradient_norms(self.loss())

    def verify_masked_training(self) -> torch.Tensor:
        return self.gradient_norms(self.materialized())

    # Log probability, entropy and prediction of every token, as policy optimisation and evaluation read them.

    def setup_token_stats(self) -> None:
        self.setup(requires_grad=False)

    def benchmark_token_stats(self) -> None:
        stats = self.kernel.linear_token_stats(self.e, self.c, self.targets)
        self.out = torch.stack([stats.logprob, stats.entropy])

    def verify_token_stats(self) -> torch.Tensor:
        logprobs = (self.e @ self.c.T).float().log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return torch.stack([logprobs.gather(1, self.targets[:, None])[:, 0], entropy])
