"""The `cuda` transport: the crossings of a program on an NVIDIA GPU, which never wait for Python."""
