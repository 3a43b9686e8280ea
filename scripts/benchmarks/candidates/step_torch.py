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


def normed(inputs: int, outputs: int, window: int, stride: int = 1) -> list[nn.Module]:
    """Build a convolution with its batch norm and ReLU."""
    return [convolution(inputs, outputs, window, stride), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class Block(nn.Module):
    """A residual block; its shortcut is projected where its shape changes."""

    def __init__(self, inputs: int, inner: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = inner * (4 if bottleneck else 1)
        if bottleneck:
            layers = [*normed(inputs, inner, 1), *normed(inner, inner, 3, stride), *normed(inner, self.outputs, 1)]
        else:
            layers = [*normed(inputs, inner, 3, stride), *normed(inner, inner, 3)]
        self.body, self.last = nn.Sequential(*layers[:-1]), layers[-1]
        is_projected = stride != 1 or inputs != self.outputs
        self.shortcut = nn.Sequential(*normed(inputs, self.outputs, 1, stride)[:-1]) if is_projected else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the body to the shortcut, and apply ReLU."""
        return self.last(self.body(x) + self.shortcut(x))


def make_resnet(name: str, num_classes: int) -> nn.Module:
    """Build one of `RESNETS`."""
    stages, channels, bottleneck, is_large = RESNETS[name]
    layers = normed(3, channels, 7, 2) if is_large else normed(3, channels, 3)
    if is_large:
        layers.append(nn.MaxPool2d(3, 2, 1))
    width = channels
    for stage, num_blocks in enumerate(stages):
        for index in range(num_blocks):
            block = Block(channels, width * 2**stage, 2 if stage and not index else 1, bottleneck=bottleneck)
            layers.append(block)
            channels = block.outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class ScaledSigmoid(nn.Module):
    """The approximate GELU of convnet8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x · sigmoid(1.702 x)."""
        return x * torch.sigmoid(1.702 * x)


class Head(nn.Linear):
    """The head of convnet8: the maximum over the map, and a classifier whose logits are scaled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return 0.125 * super().forward(x.amax((2, 3)))


def make_convnet8(num_classes: int) -> nn.Module:
    """Build Loopfeed's convnet8; each batch norm learns only a bias."""
    layers: list[nn.Module] = []
    shapes = [(3, 24, 2, 0, False)]
    for inputs, outputs in ((24, 64), (64, 128), (128, 256)):
        shapes += [(inputs, outputs, 3, 1, True), (outputs, outputs, 3, 1, False)]
    for inputs, outputs, window, margin, is_pooled in shapes:
        norm = nn.BatchNorm2d(outputs)
        norm.weight.requires_grad_(False)
        pool = [nn.MaxPool2d(2)] * is_pooled
        layers += [convolution(inputs, outputs, window, margin=margin), *pool, norm, ScaledSigmoid()]
    return nn.Sequential(*layers, Head(256, num_classes))


def main(name: str, image_size: int, batch: int, num_classes: int, variant: list[str]) -> None:
    """Serve `batch` images a unit."""
    torch.manual_seed(0)
    net = make_convnet8(num_classes) if name == "convnet8" else make_resnet(name, num_classes)
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
