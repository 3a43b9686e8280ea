"""Augmentation on the device: settings, positions that key the draws, crops, colour, mixing, erasing."""
