"""PyTorch on the work of --model=cifar_fast: training steps of the network of Jordan 2024 (arXiv:2404.00498).

    python torch_cifar_fast.py --batch=1024 --precision=bfloat16        (needs only torch and numpy)

prints one JSON line: images per second (median step), CPU seconds of all threads per step, and the variant that
was measured. Data are random images in memory. The variants are channels_last or contiguous tensors, each as
written or by torch.compile; by default each runs a few steps first, and the fastest is measured.

The network: a frozen 2x2 whitening convolution with a trained bias; three blocks of two 3x3 convolutions (64, 256
and 256 channels) with batch norm and GELU, the first one with 2x2 max pooling; global max pooling, a linear layer
without bias, divided by 9. The step: label smoothing 0.2; SGD with Nesterov momentum 0.85 and decoupled weight
decay; 64 times the rate for the biases of batch norms; every five steps a moving average of the weights.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

WIDTHS = (64, 256, 256)
RATE, MOMENTUM, DECAY, BIAS_FACTOR = 1.5, 0.85, 0.0089, 64.0
LOOKAHEAD_STEPS, LOOKAHEAD_DECAY = 5, 0.95**5
TRIAL_STEPS, WARM_UP_STEPS = 2, 2
# Steps between two waits for a GPU; a trial of a variant has as many.
GPU_STEPS = 10
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
FASTEST, CHOICES = "fastest", ("no", "yes")


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = norm(outputs), norm(outputs)
        for conv in (self.conv1, self.conv2):
            nn.init.dirac_(conv.weight[: conv.in_channels])

    def forward(self, x):
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


def norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm with a trained bias and a constant scale."""
    layer = nn.BatchNorm2d(channels, eps=1e-5, momentum=0.1)
    layer.weight.requires_grad = False
    return layer


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2)
        self.whitening.weight.requires_grad = False
        widths = (24, *WIDTHS)
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(WIDTHS[-1], 10, bias=False)

    def forward(self, x):
        x = self.blocks(F.gelu(self.whitening(x)))
        return self.head(torch.amax(x, (2, 3))) / 9


class Lookahead:
    """Slow copies of the weights: every few steps they move towards the weights, which then start from them."""

    def __init__(self, network: nn.Module):
        self.fast = list(network.parameters())
        self.slow = [weight.detach().clone() for weight in self.fast]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.slow, self.fast, 1 - LOOKAHEAD_DECAY)
        torch._foreach_copy_(self.fast, self.slow)


class Steps:
    """Training steps of one variant."""

    def __init__(self, options, layout: str, is_compiled: bool):
        torch.manual_seed(0)
        self.name = f"{layout}{', compiled' if is_compiled else ''}"
        self.bfloat16 = options.precision == "bfloat16"
        self.device = options.device
        network = Network().to(options.device, memory_format=LAYOUTS[layout])
        images = torch.randn(options.batch, 3, 32, 32)
        self.images = images.to(options.device, memory_format=LAYOUTS[layout])
        self.labels = torch.randint(0, 10, (options.batch,), device=options.device)
        self.optimizer = optimizer_of(network)
        self.lookahead = Lookahead(network)
        self.network = torch.compile(network) if is_compiled else network
        self.done = 0

    def run(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16):
            outputs = self.network(self.images)
        loss = F.cross_entropy(outputs.float(), self.labels, label_smoothing=0.2)
        loss.backward()
        self.optimizer.step()
        self.done += 1
        if self.done % LOOKAHEAD_STEPS == 0:
            self.lookahead.update()

    def measure(self, count: int) -> dict:
        """Seconds per step, measured at each step, or on a GPU after every ten; CPU seconds per step."""
        seconds, cpu = [], time.process_time()
        each = 1 if self.device == "cpu" else GPU_STEPS
        for done in range(0, count, each):
            steps, start = min(each, count - done), time.perf_counter()
            for _ in range(steps):
                self.run()
            if self.device != "cpu":
                torch.cuda.synchronize()
            seconds.append((time.perf_counter() - start) / steps)
        return {"seconds": seconds, "cpu_seconds": (time.process_time() - cpu) / count}


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    """SGD with a higher rate for the biases of batch norms, but with the same weight decay for them."""
    trained = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    biases = [weight for name, weight in trained if "norm" in name]
    others = [weight for name, weight in trained if "norm" not in name]
    groups = [
        {"params": weights, "lr": rate, "weight_decay": DECAY / rate}
        for weights, rate in ((others, RATE), (biases, RATE * BIAS_FACTOR))
    ]
    return torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True)


def fastest(options) -> dict:
    """The layout and --compile of the fastest variant.

    Each is tried in a process of its own, because compiled code may crash.
    """
    best, best_rate = None, 0.0
    layouts = list(LAYOUTS) if options.layout == FASTEST else [options.layout]
    choices = CHOICES if options.compile == FASTEST else [options.compile]
    for layout, compiled in itertools.product(layouts, choices):
        variant = {"layout": layout, "compile": compiled}
        same = {name: getattr(options, name) for name in ("batch", "threads", "precision", "device")}
        steps = TRIAL_STEPS if options.device == "cpu" else GPU_STEPS
        words = [f"--{name}={value}" for name, value in {**same, **variant, "steps": steps}.items()]
        done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{variant}: exit code {done.returncode}, left out", file=sys.stderr)
            continue
        rate = json.loads(done.stdout.splitlines()[-1])["images_per_second"]
        print(f"{variant}: {rate} images/s", file=sys.stderr)
        if rate > best_rate:
            best, best_rate = variant, rate
    if best is None:
        raise SystemExit("no variant of the peer runs")
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layout", choices=(FASTEST, *LAYOUTS), default=FASTEST)
    parser.add_argument("--compile", choices=(FASTEST, *CHOICES), default=FASTEST)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # For GPUs only, as Towers does there.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    if FASTEST in (options.layout, options.compile):
        vars(options).update(fastest(options))
    steps = Steps(options, options.layout, options.compile == "yes")
    steps.measure(WARM_UP_STEPS)
    found = steps.measure(options.steps)
    line = {
        "peer": "torch",
        "network": "cifar_fast",
        "precision": options.precision,
        "batch": options.batch,
        "variant": steps.name,
        "images_per_second": round(options.batch / statistics.median(found["seconds"]), 1),
        "cpu_seconds_per_step": round(found["cpu_seconds"], 4),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
