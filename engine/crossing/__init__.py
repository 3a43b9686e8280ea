"""Data paths between device and host: the infeed, the outfeed, and the transports that call host functions."""
