"""Batches on the host: their order, their sources, and the ring that is filled ahead of the device."""
