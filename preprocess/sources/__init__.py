"""Labelled images before packing: folders, tar archives, Kaggle's tree."""
