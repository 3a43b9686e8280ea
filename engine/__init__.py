"""The training engine: order, infeed, the compiled program, outfeed, and the commands around them."""
