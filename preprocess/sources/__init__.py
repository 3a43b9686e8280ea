"""Readers of labelled images to pack: class folders, tar archives and Kaggle's ImageNet tree."""
