"""What is minimised and what is counted: targets, loss, the tally of an evaluation."""
