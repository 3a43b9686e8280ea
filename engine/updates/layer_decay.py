"""The depth of each parameter in a network of the registry, for learning rates that decay from the head to the stem.

Bao et al. (2021), BEiT, arXiv:2106.08254; the layers are those of timm's `param_groups_layer_decay`: the stem, each
block, and the classifier with whatever is behind the last block.
"""

import re
from collections.abc import Sequence

from loopfeed.engine.patterns import Group

_STEM = re.compile(r"(conv1|bn1|stem|conv_stem|cls_token|pos_embed|patch_embed)\b")
# ResNets, the pooled network, vision transformers and EfficientNets, ConvNeXt; a block may be that of a stage.
_BLOCK = re.compile(r"(?:layer|stage|blocks\.|stages\.)(\d+)(?:\.blocks)?(?:\.(\d+)|\.downsample)?\b")
# timm counts what follows the last block to that block.
_HEAD = (2, 0, 0)
_TAIL = re.compile(r"(norm|norm_pre|bn2)\b")


def layers_of(paths: Sequence[str]) -> list[int]:
    """Return the layer of each parameter, from 0, the stem, to the classifier.

    Args:
        paths: the dotted paths of the parameters of a network of the registry.
    """
    keys = [_key(path) for path in paths]
    if any(_TAIL.match(path) for path in paths):
        # With a norm behind it, the last convolution counts as the norm does.
        last = max(key for key in keys if key < _HEAD)
        keys = [
            last if _TAIL.match(path) or path.startswith("conv_head.") else key
            for path, key in zip(paths, keys, strict=True)
        ]
    number = {key: index for index, key in enumerate(sorted(set(keys)))}
    return [number[key] for key in keys]


def _key(path: str) -> tuple[int, int, int]:
    if _STEM.match(path):
        return 0, 0, 0
    found = _BLOCK.match(path)
    return _HEAD if found is None else (1, int(found[1]), int(found[2] or 0))


def decayed_groups(paths: Sequence[str], decay: float, groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return a group for each parameter: rate × decay^(layers from the classifier), with the factors of its own group.

    Args:
        paths: as in `layers_of`.
        decay: the factor from each layer to the one below it.
        groups: the groups of the run, of which the first that matches counts.
    """
    layers = layers_of(paths)
    found = []
    for path, layer in zip(paths, layers, strict=True):
        group = next((each for each in groups if re.fullmatch(each.pattern, path)), Group(""))
        rate = group.learning_rate * decay ** (max(layers) - layer)
        found.append(Group(re.escape(path), rate, group.weight_decay))
    return tuple(found)
