"""Augmentation on the device: settings, random numbers for each image, crops, colour jitter, mixing and erasing."""
