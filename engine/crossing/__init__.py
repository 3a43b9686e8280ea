"""The two crossings between device and host, and the ways in which they call the host."""
