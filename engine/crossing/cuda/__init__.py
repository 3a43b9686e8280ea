"""The `cuda` transport: data paths between host and NVIDIA GPU on which the program never waits for Python."""
