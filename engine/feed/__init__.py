"""Batches on the host: their order, their sources, and the ring into which they are read ahead of the device."""
