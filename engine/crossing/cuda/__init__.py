"""The `cuda` transport: the crossings of a program on an NVIDIA card, which never wait for Python."""
