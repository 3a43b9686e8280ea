"""Vision transformer and ConvNeXt in NumPy, float64 and plain loops, from the papers and not from `models`.

`params` are the nested parameters of a model of the registry.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf)


def gelu(x):
    return x * 0.5 * (1 + _erf(x / np.sqrt(2)))


def norm(x, scale, bias):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * scale + bias


def layer(x, kernel, bias):
    return x @ kernel + bias


def patches(x, kernel, bias):
    """A convolution whose stride is its kernel's size, one patch after the other."""
    p, K = kernel.shape[0], kernel.shape[3]
    B, H, W, _ = x.shape
    y = np.empty((B, H // p, W // p, K))
    for row in range(H // p):
        for column in range(W // p):
            patch = x[:, row * p : (row + 1) * p, column * p : (column + 1) * p]
            y[:, row, column] = np.einsum("bijc,ijck->bk", patch, kernel) + bias
    return y


def transformer_block(x, params, num_heads):
    """Tokens [B,N,C], one image and one head after the other."""
    C = x.shape[-1]
    d = C // num_heads
    qkv = layer(norm(x, **params["norm1"]), **params["attn"]["qkv"])
    joined = np.empty_like(x)
    for image in range(len(x)):
        for head in range(num_heads):
            q, k, v = (qkv[image, :, part * C + head * d : part * C + (head + 1) * d] for part in range(3))
            weights = np.exp(q @ k.T / np.sqrt(d))
            joined[image, :, head * d : (head + 1) * d] = weights / weights.sum(1, keepdims=True) @ v
    x = x + layer(joined, **params["attn"]["proj"])
    return x + layer(gelu(layer(norm(x, **params["norm2"]), **params["mlp"]["fc1"])), **params["mlp"]["fc2"])


def vision_transformer(params, images, num_heads):
    x = patches(images, **params["patch_embed"]["proj"])
    x = x.reshape(len(x), -1, x.shape[-1])
    x = np.concatenate([np.repeat(params["cls_token"], len(x), 0), x], 1) + params["pos_embed"]
    for number in range(len(params["blocks"])):
        x = transformer_block(x, params["blocks"][str(number)], num_heads)
    return layer(norm(x, **params["norm"])[:, 0], **params["head"])


def convnext_block(x, params):
    """Images [B,H,W,C], one element of the depthwise kernel after the other."""
    _, H, W, _ = x.shape
    kernel = params["conv_dw"]["kernel"]
    padded = np.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0)))
    y = params["conv_dw"]["bias"]
    for row in range(7):
        for column in range(7):
            y = y + padded[:, row : row + H, column : column + W] * kernel[row, column, 0]
    y = layer(gelu(layer(norm(y, **params["norm"]), **params["mlp"]["fc1"])), **params["mlp"]["fc2"])
    return x + params["gamma"] * y


def convnext(params, images):
    x = norm(patches(images, **params["stem"]["0"]), **params["stem"]["1"])
    for number in range(len(params["stages"])):
        stage = params["stages"][str(number)]
        if number:
            x = patches(norm(x, **stage["downsample"]["0"]), **stage["downsample"]["1"])
        for block in range(len(stage["blocks"])):
            x = convnext_block(x, stage["blocks"][str(block)])
    return layer(norm(x.mean((1, 2)), **params["head"]["norm"]), **params["head"]["fc"])
