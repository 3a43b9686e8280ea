"""Train a ResNet-8 in PyTorch, and save its state dictionary.

Run as a script by an interpreter that has torch, safetensors, numpy and pillow.

    python torch_trunk.py FOLDER CLASSES STEPS OUT.safetensors

FOLDER has one folder of 32-pixel images per class, of which the first CLASSES are used. The weights in `docs/examples`
were made with PyTorch 2.13.0 from the images that `draw_demo` draws: `demo/train 5 300`. Floats are stored in float16.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

BATCH = 128


class Block(nn.Module):
    def __init__(self, C, K, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(C, K, 3, stride, 1, bias=False), nn.BatchNorm2d(K)
        self.conv2, self.bn2 = nn.Conv2d(K, K, 3, 1, 1, bias=False), nn.BatchNorm2d(K)
        self.downsample = None
        if C != K:
            self.downsample = nn.Sequential(nn.Conv2d(C, K, 1, stride, bias=False), nn.BatchNorm2d(K))

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet8(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2))
        self.layer3 = nn.Sequential(Block(32, 64, 2))
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x)).relu())))
        return self.fc(x.mean((2, 3)))


def load(folder, num_classes):
    images, labels = [], []
    for label, each in enumerate(sorted(path for path in Path(folder).iterdir() if path.is_dir())[:num_classes]):
        for path in sorted(each.iterdir()):
            images.append(np.asarray(Image.open(path).convert("RGB")))
            labels.append(label)
    return np.stack(images), np.array(labels)


def main(folder, num_classes, steps, out):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    images, labels = load(folder, num_classes)
    mean, std = ((images / 255).mean((0, 1, 2)), (images / 255).std((0, 1, 2)))
    net = ResNet8(num_classes).train()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
    for step in range(steps):
        chosen = random.integers(0, len(images), BATCH)
        batch = ((images[chosen] / 255 - mean) / std).transpose(0, 3, 1, 2)[..., :: random.choice([-1, 1])]
        loss = nn.functional.cross_entropy(
            net(torch.tensor(batch.copy(), dtype=torch.float32)), torch.tensor(labels[chosen])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(step + 1, round(loss.item(), 4), flush=True)
    save_file(
        {name: value.half() if value.is_floating_point() else value for name, value in net.state_dict().items()}, out
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
