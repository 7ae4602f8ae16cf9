"""What a scheme asks of a training (clipping per record, Poisson batches), and the proof of it."""
