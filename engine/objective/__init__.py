"""The objective: label smoothing, the training loss, and the counts of an evaluation."""
