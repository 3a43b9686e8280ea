"""The PyTorch network of `torch_resnet_reference.py` with given weights. Run by an interpreter that has torch.

    python torch_weights_reference.py {resnet18,resnet50} WEIGHTS.safetensors INOUT.npz

Loads the weights, all names of which must match, and adds the logits in evaluation to the images of the archive.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from torch_resnet_reference import NETWORKS, Reference  # type: ignore[import-not-found]  # beside this script


def read_float32(path):
    """Return the tensors of a safetensors file, read without the package: length, JSON header, numbers."""
    content = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            dtype = {"F32": np.float32, "I64": np.int64}[entry["dtype"]]
            numbers = np.frombuffer(content[8 + length + start : 8 + length + stop], dtype)
            tensors[name] = torch.from_numpy(numbers.reshape(entry["shape"]).copy())
    return tensors


def main(name, weights, archive):
    tensors = read_float32(weights)
    block, stages = NETWORKS[name]
    net = Reference(block, stages, len(tensors["fc.bias"]))
    net.load_state_dict(tensors, strict=True)
    with np.load(archive) as arrays:
        images = arrays["images"]
    with torch.no_grad():
        logits = net.eval()(torch.from_numpy(images)).numpy()
    np.savez(archive, images=images, logits=logits)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
