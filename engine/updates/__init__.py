"""Updates of the weights: optimizers, schedules, gradient accumulation, weight averages, skipped updates."""
