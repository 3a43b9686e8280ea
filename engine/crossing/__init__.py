"""The two crossings between device and host, and the transports by which they call the host."""
