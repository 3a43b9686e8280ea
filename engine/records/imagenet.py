"""The thousand classes of ImageNet-1k in the order of the outputs of every network that is published for them.

The file lists the WordNet identifiers, which are sorted, and WordNet's words for each.
"""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from loopfeed.preprocess.shards.classes import ImageClass, lacking

_FILE = "imagenet_classes.tsv"


@cache
def imagenet_classes() -> tuple[ImageClass, ...]:
    """Return the classes by label.

    Example:
        >>> imagenet_classes()[0]
        ImageClass(id='n01440764', name='tench, Tinca tinca')
    """
    lines = files(__package__).joinpath(_FILE).read_text(encoding="utf-8").splitlines()
    return tuple(ImageClass(*line.split("\t")) for line in lines)


def classes_or_imagenet(
    in_file: tuple[ImageClass, ...], num_outputs: int | None, in_data: Sequence[ImageClass]
) -> tuple[ImageClass, ...]:
    """Return the classes that a file records or, for one that records none, ImageNet's if they must be those.

    They must be if the file has a thousand outputs, and the data have none but classes of ImageNet.
    """
    if in_file or num_outputs != len(imagenet_classes()) or not in_data or lacking(in_data, imagenet_classes()):
        return in_file
    return imagenet_classes()
