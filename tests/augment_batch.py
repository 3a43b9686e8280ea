"""Augmented images and targets of a batch in one call, computed as in the program."""

from loopfeed.engine.images.augment import augment_images, make_targets


def augment_batch(augmentation, pixels, labels, positions, seed_words, scale, num_classes):
    images, mix_weight = augment_images(augmentation, pixels, positions, seed_words, scale)
    return images, make_targets(labels, mix_weight, num_classes)
