"""What a person or another process asks of a running training, and the word that carries it to the program."""
