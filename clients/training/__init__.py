"""Plans and certificates of a training: clipping per record, Poisson batches."""
