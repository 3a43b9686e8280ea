"""What a run leaves on disk and goes on from: its folder, logs, requests, snapshots and weights."""
