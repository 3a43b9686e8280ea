"""Augmentation on the device: settings, per-position random numbers, crops, colour, mixing and erasing."""
