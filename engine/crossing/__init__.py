"""Data paths between device and host: the infeed, the outfeed, and the transports by which they call the host."""
