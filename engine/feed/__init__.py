"""Batches on the host: their order, where they come from, and the ring that is filled ahead of the device."""
