"""The `cuda` transport: data paths through which the host enqueues work on an NVIDIA GPU ahead of its execution."""
