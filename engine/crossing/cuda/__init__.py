"""The `cuda` transport: data paths between host and NVIDIA GPU that never wait for Python."""
