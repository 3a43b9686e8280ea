"""What a run writes to disk and resumes from: its folder, logs, requests, snapshots and weights."""
