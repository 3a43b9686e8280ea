"""The files that a run writes and resumes from: the run folder with its logs, requests, snapshots and weights."""
