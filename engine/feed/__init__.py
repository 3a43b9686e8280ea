"""Batches on the host: their order, their sources, and the ring that reads them ahead of the device."""
