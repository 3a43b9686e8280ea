"""A training step in PyTorch on a resident batch: the models of Loopfeed's registry, written for torch.nn.

Default number of threads, SGD with momentum. Variants: eager or compile, the memory format, bfloat16 by autocast in the
place of float32, and a card, always with autocast, in the place of the processor.
"""

import re
import sys
import time

from protocol import Channel, timed

channel = Channel()

import torch  # noqa: E402
from torch import nn  # noqa: E402

LEARNING_RATE, MOMENTUM = 1e-3, 0.9
# stages, width, bottleneck, whether the stem is that for large images
RESNETS = {
    "resnet18": ((2, 2, 2, 2), 64, False, True),
    "resnet50": ((3, 4, 6, 3), 64, True, True),
    "resnet8": ((1, 1, 1), 16, False, False),
    "resnet20": ((3, 3, 3), 16, False, False),
}


def convolution(inputs: int, outputs: int, window: int, stride: int = 1, margin: int = -1) -> nn.Conv2d:
    """Build a convolution without a bias, padded by half its window."""
    return nn.Conv2d(inputs, outputs, window, stride, window // 2 if margin < 0 else margin, bias=False)


class Block(nn.Module):
    """A residual block; its shortcut is projected where its shape changes."""

    def __init__(self, inputs: int, inner: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = inner * (4 if bottleneck else 1)
        shapes = (
            [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, self.outputs, 1, 1)]
            if bottleneck
            else [(inputs, inner, 3, stride), (inner, inner, 3, 1)]
        )
        layers: list[nn.Module] = []
        for shape in shapes:
            layers += [convolution(*shape), nn.BatchNorm2d(shape[1]), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != self.outputs:
            projection = convolution(inputs, self.outputs, 1, stride)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(self.outputs))
        self.last = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the body to the shortcut, and apply ReLU."""
        return self.last(self.body(x) + self.shortcut(x))


def make_resnet(name: str, num_classes: int) -> nn.Module:
    """Build one of `RESNETS`."""
    stages, width, bottleneck, is_large = RESNETS[name]
    layers: list[nn.Module] = [convolution(3, width, 7 if is_large else 3, 2 if is_large else 1)]
    layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    if is_large:
        layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, num_blocks in enumerate(stages):
        for index in range(num_blocks):
            block = Block(channels, width * 2**stage, 2 if stage and not index else 1, bottleneck=bottleneck)
            layers.append(block)
            channels = block.outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class PooledLayer(nn.Module):
    """A layer of convnet8: convolution, optional max-pool, batch norm with a learned bias only, approximate GELU."""

    def __init__(self, inputs: int, outputs: int, *, window: int = 3, margin: int = 1, pool: bool = False) -> None:
        super().__init__()
        self.convolution = convolution(inputs, outputs, window, margin=margin)
        self.pool: nn.Module = nn.MaxPool2d(2) if pool else nn.Identity()
        self.norm = nn.BatchNorm2d(outputs)
        self.norm.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the four in order."""
        x = self.norm(self.pool(self.convolution(x)))
        return x * torch.sigmoid(1.702 * x)


class Convnet8(nn.Module):
    """Loopfeed's convnet8."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [PooledLayer(3, 24, window=2, margin=0)]
        channels = 24
        for width in (64, 128, 256):
            layers += [PooledLayer(channels, width, pool=True), PooledLayer(width, width)]
            channels = width
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return 0.125 * self.classifier(self.layers(x).amax((2, 3)))


def main(name: str, image_size: int, batch: int, num_classes: int, variant: list[str]) -> None:
    """Serve `batch` images a unit."""
    torch.manual_seed(0)
    net = Convnet8(num_classes) if name == "convnet8" else make_resnet(name, num_classes)
    num_params = sum(each.numel() for each in net.parameters() if each.requires_grad)
    images, labels = torch.randn(batch, 3, image_size, image_size), torch.randint(num_classes, (batch,))
    on_card = "cuda" in variant
    device, is_bfloat16 = "cuda" if on_card else "cpu", on_card or "bfloat16" in variant
    if on_card:
        torch.backends.cudnn.benchmark = True
        net, images, labels = net.cuda(), images.cuda(), labels.cuda()
    if "channels_last" in variant:
        net, images = net.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        filter(lambda each: each.requires_grad, net.parameters()), LEARNING_RATE, MOMENTUM, fused=True
    )
    called = torch.compile(net) if "compile" in variant else net

    def work(num_units: int) -> None:
        for _ in range(num_units):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=is_bfloat16):
                loss = nn.functional.cross_entropy(called(images), labels)
            loss.backward()
            optimizer.step()
        if on_card:
            torch.cuda.synchronize()

    started = time.perf_counter()
    work(2)
    warm_s = time.perf_counter() - started
    facts = {"parameters": num_params, "threads": torch.get_num_threads(), "first two steps s": round(warm_s, 1)}
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if library := re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show()):
        versions["onednn"] = library[1]
    channel.ready(batch, versions=versions, facts=facts)
    channel.serve(timed(work))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
