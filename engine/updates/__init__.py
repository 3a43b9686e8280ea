"""What gradients do to the weights: optimisers, schedules, accumulation, averages, refused updates."""
