"""An independent ResNet in PyTorch with torchvision's and timm's module names.

Run as a script by an interpreter that has torch.

    python torch_resnet_reference.py {resnet18,resnet50,resnet50-d} OUT.npz

Writes a network with random weights and norms (`weight/NAME`), a batch of images (NCHW), its logits in evaluation
(`logits_eval`), its logits in training (`logits_train`) and the running statistics after that (`after/NAME`).
"""

import sys

import numpy as np
import torch
from torch import nn


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, C, inner, stride, is_d):
        super().__init__()
        self.conv1 = nn.Conv2d(C, inner, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.downsample = projection(C, inner, stride, is_d)

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, C, inner, stride, is_d):
        super().__init__()
        self.conv1 = nn.Conv2d(C, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * inner)
        self.downsample = projection(C, 4 * inner, stride, is_d)

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        y = self.bn3(self.conv3(y))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


def projection(C, K, stride, is_d):
    if C == K and stride == 1:
        return None
    if is_d:
        pool = nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False) if stride == 2 else nn.Identity()
        return nn.Sequential(pool, nn.Conv2d(C, K, 1, bias=False), nn.BatchNorm2d(K))
    return nn.Sequential(nn.Conv2d(C, K, 1, stride, bias=False), nn.BatchNorm2d(K))


def deep_stem():
    inner = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    inner += [nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*inner, nn.Conv2d(32, 64, 3, 1, 1, bias=False))


class Reference(nn.Module):
    def __init__(self, block, stages, num_classes, is_d):
        super().__init__()
        self.conv1 = deep_stem() if is_d else nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        C = 64
        for number, num_blocks in enumerate(stages):
            inner, blocks = 64 * 2**number, []
            for index in range(num_blocks):
                blocks.append(block(C, inner, 2 if number and not index else 1, is_d))
                C = inner * block.expansion
            setattr(self, f"layer{number + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(C, num_classes)

    def forward(self, x):
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


NETWORKS = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet50-d": (Bottleneck, (3, 4, 6, 3)),
}


def main(name, out):
    torch.manual_seed(0)
    block, stages = NETWORKS[name]
    net = Reference(block, stages, 10, name.endswith("-d"))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):  # a fresh norm is an identity and would hide a swapped name
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    images = torch.randn(4, 3, 65, 64)
    arrays = {f"weight/{name}": value.numpy().copy() for name, value in net.state_dict().items()}
    with torch.no_grad():
        arrays |= {"images": images.numpy(), "logits_eval": net.eval()(images).numpy()}
        arrays["logits_train"] = net.train()(images).numpy()
    arrays |= {f"after/{name}": value.numpy() for name, value in net.state_dict().items() if "running" in name}
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
