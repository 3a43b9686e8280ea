"""Augmentation on the device: settings, random numbers by position, crops, colour, mixing and erasing."""
